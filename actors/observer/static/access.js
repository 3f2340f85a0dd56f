// The secret of the page. It comes in the fragment of the URL, which a browser sends to no server, and is kept for this
// origin, which is the address with its port. A cookie would go to all ports of the address.
"use strict";

const KEPT = "physarum"; // name in the storage of the tab, and of the channel between tabs of this origin
const TABS_MS = 500; // for another tab to answer

let secret = "";
let tabs = null; // the channel between tabs of this origin

class NoSecret extends Error {}

// Take the secret from the URL and hide it there. Return whether there was one.
function takeSecret() {
  if (!tabs) {
    tabs = new BroadcastChannel(KEPT);
    tabs.addEventListener("message", (message) => {
      if (message.data.asks && secret) tabs.postMessage({ secret });
    });
  }
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    keepSecret(given);
    history.replaceState(null, "", location.pathname);
  } else {
    secret = secret || kept();
  }
  return Boolean(given);
}

function kept() {
  try {
    return sessionStorage.getItem(KEPT) || "";
  } catch {
    return ""; // the browser allows no storage: this tab works until it is closed or loaded again
  }
}

function keepSecret(given) {
  secret = given;
  try {
    sessionStorage.setItem(KEPT, given);
  } catch {
    // as above
  }
}

// A tab that was opened without the secret gets it from one that has it.
function askTabs() {
  return new Promise((resolve) => {
    const answered = (message) => {
      if (!message.data.secret) return;
      keepSecret(message.data.secret);
      done();
    };
    const done = () => {
      tabs.removeEventListener("message", answered);
      resolve();
    };
    tabs.addEventListener("message", answered);
    tabs.postMessage({ asks: true });
    setTimeout(done, TABS_MS);
  });
}

async function fetched(path, options = {}) {
  if (!secret) await askTabs();
  const response = secret && await fetch(path, { ...options, headers: { Authorization: `Bearer ${secret}` } });
  if (secret && response.status !== 401) return response;
  secret = ""; // it was renewed: another tab may have the new one
  throw new NoSecret("this tab does not have the page's secret");
}

// Return a path with a ticket, for a request that can have no header. It is valid once, and for 30 seconds.
async function ticketed(path) {
  const response = await fetched("/ticket", { method: "POST" });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return `${path}?ticket=${await response.text()}`;
}
