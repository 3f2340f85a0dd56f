// The view of samples. Texts and tokens of the run are set as text, never as markup.
"use strict";

const SAMPLES_AGAIN_MS = 5000; // at most so often a run that goes on has its list read again
const UNREAD_MS = 200; // before more dump files are read
const SHOWN_SIDE_BY_SIDE = 2; // samples of a group at first: the worst and the best
const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01]; // bounds of the colours by log-prob
const NUM_VERSION_COLOURS = 6;
const COLOURINGS = {
  none: "text only",
  logprob: "log-prob of the engine",
  mask: "loss mask",
  version: "weights version",
  trainer: "log-prob of the trainer",
  difference: "trainer less engine",
  rule: "rule that masks or limits",
};
const OF_TRAINER = ["trainer", "difference", "rule"]; // they need observe.tokens
const DIFFERENCES = [0.01, 0.1, 0.5, 1, 2]; // bounds of the colours by difference
const NUM_RULE_COLOURS = 6;

const view = {
  ready: false, busy: false, again: false, later: null, step: -1, listedAt: 0,
  list: null, groups: [], next: null, isFirst: true, // of the list; isFirst: it has no further part
  group: null, wanted: null, places: [], tokens: new Map(), // of the open group
};

// where samples come from: the server of the page, or a report that has some

async function asked(path, query) {
  if (state && state.samples) return askedOfReport(path, query);
  const response = await fetched(`${path}?${new URLSearchParams(query)}`);
  const text = await response.text();
  try {
    return JSON.parse(text);
  } catch {
    return { problem: text };
  }
}

function askedOfReport(path, query) {
  const { groups, tokens, listed } = state.samples;
  if (path === "/samples/group") {
    const found = groups.find((group) => String(group.group) === query.group && (!query.step || String(group.step) === query.step));
    return found || { problem: `This report does not have group ${query.group}.` };
  }
  if (path === "/samples/tokens") {
    return tokens[`${query.step}/${query.group}/${query.place}`] || { problem: "This report does not have the tokens of this sample." };
  }
  if (listed.problem) return listed;
  const wanted = query.search.toLowerCase();
  const has = (group) => [group.prompt, group.label, ...group.samples.map((sample) => sample.response)].some((text) => text.toLowerCase().includes(wanted));
  const known = new Set(groups.filter((group) => !wanted || has(group)).map((group) => `${group.step}/${group.group}`));
  const sign = query.order === "ascending" ? 1 : -1;
  const value = (group) => (group[query.sort] === null ? -Infinity * sign : group[query.sort]);
  const found = listed.groups.filter((group) => known.has(`${group.step}/${group.group}`));
  return { ...listed, groups: found.sort((a, b) => sign * (value(a) - value(b)) || 0), next: null };
}

// the list

function listQuery(offset) {
  return { search: at("samples-search").value, sort: at("samples-sort").value, order: at("samples-order").value, offset: String(offset) };
}

async function list(more) {
  if (view.busy) {
    view.again = view.again || !more; // with what is chosen by then
    return;
  }
  view.busy = true;
  view.listedAt = Date.now();
  view.step = state.now.step;
  const found = await asked("/samples", listQuery(more ? view.next : 0)).catch(() => ({ problem: "The page's server does not answer." }));
  view.busy = false;
  if (view.again) {
    view.again = false;
    list(false);
    return;
  }
  view.list = found;
  view.isFirst = !more;
  const known = new Set(more ? view.groups.map(groupKey) : []); // a run that goes on moves groups to the next part
  view.groups = [...(more ? view.groups : []), ...(found.groups || []).filter((group) => !known.has(groupKey(group)))];
  view.next = found.next ?? null;
  drawList();
  listLater();
}

// Have the list read again while files are unread or a step is new. Further parts would begin anew, so they stay.
function listLater() {
  const isUnread = view.list.num_unread > 0;
  const isNew = state.now.step !== view.step && !at("samples-search").value; // a search is not repeated for each step
  if (view.later !== null || !view.isFirst || !(isUnread || isNew)) return;
  const rest = isUnread ? UNREAD_MS : Math.max(0, view.listedAt + SAMPLES_AGAIN_MS - Date.now());
  view.later = setTimeout(() => {
    view.later = null;
    if (chosen() === "samples" && !view.busy && view.isFirst) list(false); // else drawSamples goes on
  }, rest);
}

const groupKey = (group) => `${group.step}/${group.group}/${group.attempt}`;
const reward = (value) => (value === null || value === undefined ? "none" : String(Number(value.toFixed(4))));
const weights = (versions) => (!versions ? "" : versions[0] === versions[1] ? `v${versions[0]}` : `v${versions[0]} to v${versions[1]}`);

function drawList() {
  const found = view.list;
  const notes = [];
  if (found.problem) notes.push(found.problem);
  if (found.note) notes.push(`${found.note}, ${found.source}`);
  if (found.num_groups !== undefined && !found.problem) {
    const searched = at("samples-search").value && view.next !== null ? `${view.next} of ` : "";
    notes.push(`${searched}${found.num_groups} groups ${found.source}`);
  }
  if (found.num_unread) notes.push(`${found.num_unread} steps are not read yet`);
  if (found.num_left_out) notes.push(`${found.num_left_out} oldest steps are left out`);
  if (found.num_problems) notes.push(`${found.num_problems} steps cannot be read: ${found.problems.join("; ")}`);
  at("samples-state").textContent = notes.join("; ");
  at("samples-state").className = found.problem || found.num_problems ? "bad" : "faint";
  const heads = [["group"], ["step", "number"], ["reward", "number"], ["rewards", "more"], ["tokens", "number"], ["weights", "more"], ["outcome"], ["label"], ["prompt"], ["best response"], ["worst response"]];
  fillTable(at("samples-list"), heads, view.groups.map((group) => {
    const cell = make("td");
    const button = make("button", group.group, "link");
    button.addEventListener("click", () => open(group));
    cell.append(button);
    if (view.group && groupKey(view.group) === groupKey(group)) button.setAttribute("aria-current", "true");
    const rewards = `${group.rewards.map(reward).join(" ")}${group.num_samples > group.rewards.length ? " ..." : ""}`;
    const outcome = group.reason ? `${group.outcome}: ${group.reason}` : group.outcome;
    return [cell, group.step + 1, reward(group.reward), rewards, short(group.length, 0), weights(group.versions), outcome, ...[group.label, group.prompt, ...listedResponses(group)].map((text) => make("td", text, "text"))];
  }));
  at("samples-more").hidden = view.next === null;
}

const listedResponses = ({ responses: [best, worst] }) => // a response may be empty
  best === undefined ? ["", ""] : [best || "(empty)", worst === undefined ? "(same reward)" : worst || "(empty)"];

// one group

function open(group) {
  view.wanted = String(group.group);
  location.hash = `group=${group.group}${group.step === undefined ? "" : `&step=${group.step}`}`;
  readGroup(group);
}

async function readGroup(group) {
  const query = { group: String(group.group), ...(group.step === undefined ? {} : { step: String(group.step) }) };
  const found = await asked("/samples/group", query).catch(() => ({ problem: "The page's server does not answer." }));
  if (view.wanted !== String(group.group)) return; // another one was opened meanwhile
  view.group = found.problem ? null : found;
  view.tokens.clear();
  view.places = found.problem ? [] : found.samples.slice(0, SHOWN_SIDE_BY_SIDE).map((sample) => sample.place);
  if (found.problem) at("samples-group").replaceChildren(make("p", found.problem, found.again ? "faint" : "bad"));
  else drawGroup();
  if (view.list) drawList();
  if (found.again) setTimeout(() => view.wanted === String(group.group) && !view.group && readGroup(group), UNREAD_MS);
}

function move(by) {
  if (!view.groups.length) return;
  const place = view.group ? view.groups.findIndex((group) => groupKey(group) === groupKey(view.group)) : -1;
  const next = place < 0 ? 0 : place + by;
  if (next >= 0 && next < view.groups.length) open(view.groups[next]);
}

function facts(pairs) {
  const rows = make("dl");
  for (const [name, value] of pairs) if (value !== "" && value !== null && value !== undefined) rows.append(make("dt", name), make("dd", value, "text"));
  return rows;
}

function drawGroup() {
  const group = view.group;
  const title = make("h2", `Group ${group.group}, ${group.place}`);
  const buttons = make("p");
  for (const [text, by] of [["previous group (k)", -1], ["next group (j)", 1]]) {
    const button = make("button", text);
    button.addEventListener("click", () => move(by));
    buttons.append(button, " ");
  }
  const about = facts([
    ["outcome", group.reason ? `${group.outcome}: ${group.reason}` : group.outcome], ["data", group.data], ["prompt", group.prompt],
    ["label", group.label], ["metadata", group.metadata === "{}" ? "" : group.metadata],
    ["generation", `${short(group.rollout_time_s, 2)} s, scores ${short(group.reward_time_s, 2)} s`],
    ["greedy sample", group.baseline_reward === null ? "" : `reward ${reward(group.baseline_reward)}`],
  ]);
  const table = make("table");
  fillTable(table, [["shown"], ["sample", "number"], ["reward", "number"], ["tokens", "number"], ["status", "keep"], ["weights", "keep"], ["reason"]], group.samples.map((sample) => {
    const cell = make("td");
    const box = make("input");
    box.type = "checkbox";
    box.checked = view.places.includes(sample.place);
    box.setAttribute("aria-label", `show sample ${sample.index}`);
    box.addEventListener("change", () => {
      view.places = box.checked ? [...view.places, sample.place] : view.places.filter((place) => place !== sample.place);
      drawPanels();
    });
    cell.append(box);
    return [cell, sample.part ? `${sample.index}, part ${sample.part}` : sample.index, reward(sample.reward), sample.response_len, sample.status, weights(sample.versions), sample.reason];
  }));
  const scroll = make("div", undefined, "scroll");
  scroll.append(table);
  const panels = make("div", undefined, "panels");
  panels.id = "samples-panels";
  const left = group.num_samples - group.samples.length;
  at("samples-group").replaceChildren(title, buttons, about, scroll, ...(left ? [make("p", `${left} more samples are left out.`, "faint")] : []), panels);
  drawPanels();
}

function drawPanels() {
  const colouring = at("samples-colour").value;
  const shown = view.group.samples.filter((sample) => view.places.includes(sample.place));
  at("samples-panels").replaceChildren(...shown.map((sample) => {
    const panel = make("article", undefined, "sample");
    const rewards = Object.entries(sample.rewards).map(([name, value]) => `${name} ${reward(value)}`).join(", ");
    panel.append(make("h3", `Sample ${sample.index}${sample.part ? `, part ${sample.part}` : ""}: reward ${reward(sample.reward)}`));
    panel.append(facts([["status", sample.status], ["reason", sample.reason], ["rewards", rewards], ["the grader said", sample.score],
      ["metadata", sample.metadata], ["segments", sample.num_segments > 1 ? sample.num_segments : ""]]));
    const place = make("div");
    panel.append(place);
    if (colouring === "none") place.append(make("pre", sample.response, "text"));
    else drawTokens(place, sample, colouring);
    return panel;
  }));
}

async function drawTokens(place, sample, colouring) {
  const group = view.group;
  if (!view.tokens.has(sample.place)) {
    place.append(make("p", "reading tokens", "faint"));
    await fetchTokens(group, sample, 0);
    if (view.group !== group) return;
  }
  showTokens(place, group, sample, colouring);
}

async function fetchTokens(group, sample, from) {
  const query = { group: String(group.group), step: String(group.step), place: String(sample.place), from: String(from) };
  const found = await asked("/samples/tokens", query).catch(() => ({ problem: "The page's server does not answer." }));
  const known = view.tokens.get(sample.place);
  if (view.group !== group) return;
  if (from && known && !found.problem) {
    for (const [name, values] of Object.entries(found)) if (Array.isArray(values) && name !== "rule_names") known[name] = [...known[name], ...values];
  } else if (!from) {
    view.tokens.set(sample.place, found);
  }
}

function kindOf(tokens, index, colouring) { // the class that colours a token
  if (tokens.inputs[index]) return "input";
  if (colouring === "mask") return tokens.mask[index] ? "mask1" : "mask0";
  if (colouring === "version") return tokens.versions[index] === null ? "" : `version${tokens.versions[index] % NUM_VERSION_COLOURS}`;
  if (colouring === "difference") return differenceKind(differenceOf(tokens, index));
  if (colouring === "rule") {
    const rule = rulesOf(tokens, index)[0];
    return rule === undefined ? "mask1" : `version${tokens.rule_names.indexOf(rule) % NUM_RULE_COLOURS} ruled`;
  }
  return probabilityKind(colouring === "trainer" ? tokens.trainer_log_probs[index] : tokens.log_probs[index]);
}

function differenceOf(tokens, index) {
  const [trainer, engine] = [tokens.trainer_log_probs[index], tokens.log_probs[index]];
  return trainer === null || trainer === undefined || engine === null ? null : trainer - engine;
}

function differenceKind(difference) {
  if (difference === null) return "";
  const bucket = DIFFERENCES.findIndex((bound) => Math.abs(difference) < bound);
  return `likely${bucket < 0 ? DIFFERENCES.length : bucket}`;
}

const rulesOf = (tokens, index) => tokens.rule_names.filter((name, bit) => (tokens.rules[index] >>> bit) & 1);

function probabilityKind(logProb) {
  if (logProb === null || logProb === undefined) return "";
  const bucket = PROBABILITIES.findIndex((bound) => Math.exp(logProb) >= bound);
  return `likely${bucket < 0 ? PROBABILITIES.length : bucket}`;
}

function legendOf(tokens, colouring) {
  const legend = make("p", undefined, "legend");
  const add = (kind, text) => legend.append(make("span", text, `token ${kind}`), " ");
  if (tokens.inputs.some(Boolean)) add("input", "prompt or tool text");
  if (colouring === "mask") {
    add("mask1", "trains");
    add("mask0", "masked");
  } else if (colouring === "version") {
    for (const version of new Set(tokens.versions.filter((version) => version !== null))) add(`version${version % NUM_VERSION_COLOURS}`, `v${version}`);
  } else if (colouring === "difference") {
    DIFFERENCES.forEach((bound, index) => add(`likely${index}`, `< ${bound}`));
    add(`likely${DIFFERENCES.length}`, `≥ ${DIFFERENCES[DIFFERENCES.length - 1]}`);
  } else if (colouring === "rule") {
    add("mask1", "no rule");
    const found = new Set(tokens.ids.flatMap((id, index) => (tokens.inputs[index] ? [] : rulesOf(tokens, index))));
    for (const name of found) add(`version${tokens.rule_names.indexOf(name) % NUM_RULE_COLOURS} ruled`, name);
  } else {
    PROBABILITIES.forEach((bound, index) => add(`likely${index}`, `p ≥ ${bound}`));
    add(`likely${PROBABILITIES.length}`, `p < ${PROBABILITIES[PROBABILITIES.length - 1]}`);
  }
  return legend;
}

function tokenFacts(tokens, index) {
  const text = tokens.texts ? `${JSON.stringify(tokens.texts[index])}, ` : "";
  const start = `token ${tokens.from + index}: ${text}id ${tokens.ids[index]}`;
  if (tokens.inputs[index]) return `${start}, prompt or tool text`;
  const logProb = tokens.log_probs[index];
  const sampled = logProb === null ? "" : `, log-prob ${short(logProb, 4)} (p ${Math.exp(logProb).toPrecision(3)})`;
  const difference = tokens.is_trained ? differenceOf(tokens, index) : null;
  const trainer = difference === null ? "" : `, trainer ${short(tokens.trainer_log_probs[index], 4)} (difference ${short(difference, 4)})`;
  const rules = tokens.is_trained && !tokens.left_out ? rulesOf(tokens, index) : [];
  const more = `${trainer}${rules.length ? `, rule: ${rules.join(", ")}` : ""}${tokens.staleness[index] > 0 ? `, staleness ${tokens.staleness[index]}` : ""}`;
  return `${start}${sampled}${more}, ${tokens.mask[index] ? "trains" : "masked"}${tokens.versions[index] === null ? "" : `, v${tokens.versions[index]}`}`;
}

function showTokens(place, group, sample, colouring) {
  const tokens = view.tokens.get(sample.place);
  if (!tokens || tokens.problem) {
    place.replaceChildren(make("p", tokens ? tokens.problem : "The tokens are gone.", "bad"));
    return;
  }
  const notes = [];
  if (tokens.trained_problem) notes.push(make("p", tokens.trained_problem, "bad"));
  else if (!tokens.is_trained && OF_TRAINER.includes(colouring)) {
    notes.push(make("p", tokens.untrained, "faint"));
  }
  if (tokens.left_out) notes.push(make("p", `The trainer left this sample out: ${tokens.left_out}.`, "bad"));
  const box = make("div", undefined, "tokens text");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `tokens of sample ${sample.index}; the arrow keys move`);
  const about = make("p", "Select a token, or move with the arrow keys.", "faint");
  about.setAttribute("role", "status");
  const spans = tokens.ids.map((id, index) => make("span", tokens.texts ? tokens.texts[index] || "·" : `${id} `, `token ${kindOf(tokens, index, colouring)}`));
  let selected = -1;
  const select = (index) => {
    if (index < 0 || index >= spans.length) return;
    if (selected >= 0) spans[selected].classList.remove("selected");
    selected = index;
    spans[index].classList.add("selected");
    spans[index].scrollIntoView({ block: "nearest" });
    about.textContent = tokenFacts(tokens, index);
  };
  box.addEventListener("click", (event) => select(spans.indexOf(event.target)));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    select(selected < 0 ? 0 : selected + by);
  });
  box.append(...spans);
  const rest = tokens.total - tokens.from - tokens.ids.length;
  const end = [];
  if (rest > 0) {
    const button = make("button", `${rest} more tokens`);
    button.disabled = Boolean(state && state.samples);
    button.addEventListener("click", async () => {
      button.disabled = true;
      await fetchTokens(group, sample, tokens.from + tokens.ids.length);
      if (view.group === group) showTokens(place, group, sample, colouring);
    });
    end.push(button);
  }
  if (!tokens.texts) notes.push(make("p", "There is no tokenizer.json that can be read, so tokens are shown as ids.", "faint"));
  place.replaceChildren(legendOf(tokens, colouring), ...notes, box, about, ...end);
}

// what app.js calls

function drawSamples() {
  if (!view.ready) prepareSamples();
  const wanted = new URLSearchParams(location.hash.slice(1));
  const group = wanted.get("group");
  if (group && group !== view.wanted) open({ group, step: wanted.get("step") || undefined });
  if (view.list) listLater();
  else if (!view.busy) list(false);
}

function prepareSamples() {
  view.ready = true;
  for (const [name, text] of Object.entries(COLOURINGS)) {
    const option = make("option", text);
    option.value = name;
    at("samples-colour").append(option);
  }
  let typed = 0;
  at("samples-search").addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => list(false), 300);
  });
  for (const id of ["samples-sort", "samples-order"]) at(id).addEventListener("change", () => list(false));
  at("samples-colour").addEventListener("change", () => view.group && drawPanels());
  at("samples-more").addEventListener("click", () => list(true));
  document.addEventListener("keydown", (event) => {
    if (chosen() !== "samples" || isTyping(event)) return;
    if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
    else if (event.key === "/") at("samples-search").focus();
    else return;
    event.preventDefault();
  });
}
