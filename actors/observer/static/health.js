// The strip on every view: the state of the run in a word, its newest reward and evaluation, and what goes wrong.
"use strict";

const LOST = "connection lost";
const MARKS = { // beside the words, so that nothing depends on colour
  "log cannot be read": "?", "reading the log": "\u2026", starting: "\u25cb", running: "\u25cf", stalled: "\u25b2",
  failed: "\u2715", stopped: "\u25a0", finished: "\u2713", "not running": "?", [LOST]: "?",
};
const SCORES = [["Reward", "rollout/raw_reward"], ["Loss", "train/sft_loss"], ["Loss", "train/preference_loss"], ["Loss", "train/loss"]];
const FAILS_FROM = 0.05; // share of the groups from which failures are marked
const SPARK = { width: 72, height: 20, points: 200 };
const ENDED = ["failed", "stopped", "finished"];

let isLost = false; // the connection of this page

// Show the strip. Steps are those of the rows of metrics, the newest first; names are those of all metrics.
function drawHealth(state, steps, rows, names) {
  const health = state.health;
  const word = isLost && !(state.closing && ENDED.includes(health.state)) ? LOST : health.state;
  const badge = make("span", `${MARKS[word]} ${word}`, "badge");
  badge.dataset.state = word;
  const why = word === LOST ? `it was ${health.state} when this page heard of it last` : health.detail;
  at("health-state").replaceChildren(badge, ...(why ? [" ", make("span", why, "why")] : []));
  document.querySelector("header").dataset.state = word;
  const numbers = [];
  const add = (name, value, options = {}) => {
    const cell = make("div", undefined, options.bad ? "bad" : "");
    const text = make("dd", `${options.bad ? "\u25b2 " : ""}${value}`);
    if (options.curve) text.append(" ", sparkline(options.curve, name));
    cell.append(make("dt", name), text);
    if (options.link) text.replaceChildren(linkTo(options.link, text.textContent));
    numbers.push(cell);
  };
  const curve = (name) => {
    const values = [];
    for (const step of steps) {
      const value = number(rows.get(step)[name]);
      if (value !== null && values.push(value) === SPARK.points) break;
    }
    return values.reverse();
  };
  const score = SCORES.find(([, name]) => names.has(name));
  if (score) addCurve(add, score[0], curve(score[1]));
  const evaluation = [...names].filter((name) => EVALUATIONS.test(name)).sort()[0];
  if (evaluation !== undefined) addCurve(add, `Evaluation ${evaluation.slice("eval/".length)}`, curve(evaluation));
  const rate = curve("perf/tokens_per_sec");
  if (rate.length) add("Tokens/s", Math.round(rate[rate.length - 1]).toLocaleString("en-US"));
  if (health.left_s !== null) add("Time left", `about ${spell(health.left_s)}`);
  const share = (count) => (count ? `${count.toLocaleString("en-US")} (${Math.round((100 * count) / health.issued)} %)` : "0");
  add("Failed groups", share(health.failed), { bad: health.failed > FAILS_FROM * health.issued });
  add("Dropped", share(health.dropped));
  add("Restarts", health.restarts, { bad: health.restarts > 0 });
  add("Advice", state.advice.length || "none", { bad: state.advice.length > 0, link: "advice" });
  at("health-numbers").replaceChildren(...numbers);
}

function addCurve(add, name, values) {
  if (values.length) add(name, short(values[values.length - 1]), { curve: values });
}

function linkTo(tab, text) {
  const link = make("a", text);
  link.href = `#${tab}`;
  return link;
}

function sparkline(values, name) {
  const draw = (kind, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (index) => (values.length > 1 ? (index * SPARK.width) / (values.length - 1) : SPARK.width);
  const y = (value) => (high > low ? 1 + ((high - value) * (SPARK.height - 2)) / (high - low) : SPARK.height / 2);
  const points = values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`);
  if (points.length === 1) points.unshift(`0,${y(values[0]).toFixed(1)}`);
  const svg = draw("svg", { width: SPARK.width, height: SPARK.height, viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, role: "img",
    "aria-label": `${name} from ${short(values[0])} to ${short(values[values.length - 1])}` });
  svg.append(draw("polyline", { points: points.join(" "), fill: "none", stroke: "currentColor", "stroke-width": 1.5 }));
  return svg;
}

function spell(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return minutes < 90 ? `${minutes} min` : minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.round(minutes / 1440)} days`;
}
