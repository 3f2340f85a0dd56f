// The page of a run. Everything that comes from the run is set as text, never as markup.
"use strict";

const EVALUATIONS = /^eval\/(?!step$)(?!.*-(truncated|newer_weights|ungraded)_ratio$)[^/]+$/;
const CURVES = [
  ["Reward", ["rollout/raw_reward", "rollout/rewards"]],
  ["Evaluation", EVALUATIONS],
  ["Loss", ["train/loss", "train/pg_loss", "train/sft_loss", "train/preference_loss"]],
  ["KL", ["train/kl_loss", "train/ppo_kl", "rollout/kl"]],
  ["Entropy", ["train/entropy_loss"]],
  ["Response length, tokens", ["rollout/response_len/mean", "rollout/response_len/max"]],
  ["Truncated", ["rollout/truncated_ratio"]],
  ["Failed, share", ["rollout/failed_group_ratio", "rollout/failed_sample_ratio"]],
  ["Staleness", ["rollout/staleness_mean", "rollout/staleness_max"]],
  ["Gradient norm", ["train/grad_norm", "train/critic-grad_norm"]],
  ["Tokens per second", ["perf/tokens_per_sec"]],
  ["Step time, s", ["perf/step_time", "perf/train_wait_time", "perf/train_time"]],
  ["Log-prob difference of engine and trainer", ["train/train_rollout_logprob_abs_diff"]],
];
const COLOURS = ["#1a73e8", "#e8710a", "#188038", "#a142f4", "#d93025", "#129eaf", "#b06000", "#7b8794",
  "#c5221f", "#5f6368", "#34a853", "#fa7b17", "#4285f4", "#9334e6", "#e52592"];
const BOOKS = ["issued", "trained", "skipped", "dropped", "failed", "pooled", "ready", "in_flight"];
const LIVE = ["in_flight", "pooled", "ready"];
const KEPT_STEPS = 2000; // of more, every second one is left out, as the process of the page does
const AGAIN_MS = 5000; // before a refused connection is tried again
const MAX_FOUND = 24; // charts of a search
const TABS = ["curves", "now", "time", "timeline", "advice", "samples", "ledger", "settings"];

const rows = new Map(); // metrics by step
const known = new Set(); // names of metrics
const others = new Map(); // metrics by step of a run to compare with
const times = new Map(); // seconds by part, by the begin of a step: its end has the number of the last one
const charts = new Map(); // by the id of their element
let state = null;
let settings = {};
let versions = {};

const at = (id) => document.getElementById(id);
const make = (name, text, kind) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = String(text);
  if (kind) element.className = kind;
  return element;
};
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const short = (value, digits = 3) => Number(value).toFixed(digits);

function fillTable(table, heads, lines) {
  const head = make("tr");
  for (const [text, kind] of heads) head.append(make("th", text, kind));
  const body = lines.map((cells) => {
    const line = make("tr");
    cells.forEach((cell, index) => line.append(cell instanceof Node ? cell : make("td", cell, heads[index][1])));
    return line;
  });
  if (!lines.length) {
    const [line, cell] = [make("tr"), make("td", "none", "faint")];
    cell.colSpan = heads.length;
    line.append(cell);
    body.push(line);
  }
  table.replaceChildren(head, ...body);
}

// charts

function number(value) {
  if (value === undefined || value === null) return null;
  const found = Number(value);
  return Number.isFinite(found) ? found : null;
}

function tick(value) { // of the y axis; very small and very large values would else be 0 or too wide
  if (value === null) return "";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(1) : value.toLocaleString("en-US");
}

function yRange(chart, low, high) { // a constant is a line in the middle
  if (low === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1), high + (Math.abs(high) || 1)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function draw(place, names, data, options = {}) {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
  const width = Math.max(120, place.clientWidth - 18);
  const known = charts.get(place);
  const key = JSON.stringify([names, text]);
  if (known && known.key === key) {
    if (known.chart.width !== width) known.chart.setSize({ width, height: known.chart.height });
    known.value = options.value;
    known.chart.setData(data);
    return;
  }
  if (known) known.chart.destroy();
  const made = { key, value: options.value };
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const series = names.map((name, index) => {
    const colour = COLOURS[index % COLOURS.length];
    if (options.dashed && index >= options.dashed) {
      const first = COLOURS[(index - options.dashed) % COLOURS.length];
      return { label: name, stroke: first, width: 1.5, spanGaps: true, dash: [4, 4], points: { show: false } };
    }
    const fill = options.stacked ? { fill: colour, points: { show: false } } : {};
    const value = options.value && ((...of) => made.value(...of)); // that of the newest data
    return { label: name, stroke: colour, width: 1.5, spanGaps: true, ...fill, value };
  });
  const newest = (chart) => { // in the legend, unless the pointer chooses a step
    if (chart.cursor.idx !== null && chart.cursor.idx !== undefined) return;
    const idxs = chart.data.map((column) => column.findLastIndex((value) => value !== null && value !== undefined));
    chart.setLegend({ idxs: idxs.map((index) => (index < 0 ? null : index)) }, false);
  };
  made.chart = new uPlot({
    hooks: { draw: [newest], setCursor: [newest] },
    width, height: options.height || 200, scales: { x: { time: Boolean(options.time) }, y: { range: yRange } },
    axes: [options.time ? { ...axis, space: 90, values: (chart, splits) => splits.map(clock) } : axis, { ...axis, size: 64, values: (chart, splits) => splits.map(tick) }], series: [{ label: options.time ? "time" : "step" }, ...series],
  }, data, place);
  charts.set(place, made);
}

function stacked(columns) { // each column plus those after it, so that the first one is drawn first and highest
  const sums = columns.map((column) => column.slice());
  for (let index = columns.length - 2; index >= 0; index--) {
    sums[index] = sums[index].map((value, row) => value + sums[index + 1][row]);
  }
  return sums;
}

function chartBox(parent, id, title) {
  let box = at(id);
  if (!box) {
    box = make("div", undefined, "chart");
    box.id = id;
    box.append(make("h3", title), make("div"));
    parent.append(box);
  }
  return box.lastChild;
}

function smoothed(values) { // exponential mean, without a bias to the first value
  const weight = Number(at("smooth").value);
  if (!weight) return values;
  let [sum, whole] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    [sum, whole] = [weight * sum + (1 - weight) * value, weight * whole + (1 - weight)];
    return sum / whole;
  });
}

function distinct(names, columns) { // columns by their names; equal ones are one curve, which would hide the other
  const found = [];
  names.forEach((name, index) => {
    const equal = found.find((curve) => curve.column.every((value, row) => value === columns[index][row]));
    if (equal) equal.names.push(name);
    else found.push({ names: [name], column: columns[index] });
  });
  return new Map(found.map((curve) => [curve.names.join(" = "), curve.column]));
}

function drawCurves() {
  const steps = [...new Set([...rows.keys(), ...others.keys()])].sort((a, b) => a - b);
  const wanted = CURVES.map(([title, which]) => [
    title, which instanceof RegExp ? [...known].filter((name) => which.test(name)).sort() : which.filter((name) => known.has(name)),
  ]);
  const search = at("search").value.trim();
  if (search) {
    const found = [...known].filter((name) => name.includes(search)).sort().slice(0, MAX_FOUND);
    wanted.unshift(...found.map((name) => [name, [name]]));
  }
  const ids = new Set();
  const parent = at("charts");
  for (const [title, names] of wanted) {
    if (!names.length) continue;
    const id = `chart ${title}`;
    ids.add(id);
    const place = chartBox(parent, id, title);
    const of = (table) => names.map((name) => smoothed(steps.map((step) => number((table.get(step) || {})[name]))));
    if (others.size) {
      const more = names.map((name) => `${name} of ${state.other.run}`);
      draw(place, [...names, ...more], [steps, ...of(rows), ...of(others)], { dashed: names.length });
    } else {
      const curves = distinct(names, of(rows));
      draw(place, [...curves.keys()], [steps, ...curves.values()]);
    }
  }
  for (const box of [...parent.children]) {
    if (ids.has(box.id)) continue;
    const known = charts.get(box.lastChild);
    if (known) known.chart.destroy();
    charts.delete(box.lastChild);
    box.remove();
  }
  if (!parent.children.length) parent.append(make("p", "No step has been trained yet.", "faint"));
}

function stateOf(process, ended) { // the end of a run is not a fault of its processes
  if (ended) return make("td", "ended", "faint");
  return make("td", process.is_up ? "up" : "down", process.is_up ? "" : "bad");
}

function drawNow() {
  const now = state.now;
  at("progress").textContent = state.live ? now.progress : now.ended || "no node daemon runs this run";
  at("waiting").replaceChildren(...Object.entries(now.waiting).map(([who, what]) => make("p", `${who} waits for ${what}`, "bad")));
  if (now.course.length) {
    const columns = LIVE.map((name) => now.course.map((sample) => sample[1 + BOOKS.indexOf(name)]));
    draw(at("course"), LIVE.map((name) => name.replace("_", " ")), [now.course.map((sample) => sample[0]), ...stacked(columns)], {
      stacked: true, time: true, value: (chart, value, series, row) => value === null || row === null ? "" : columns[series - 1][row],
    });
  }
  fillTable(at("engines"), [["engine"], ["state", "keep"], ["weights", "number"], ["update, s", "number more"], ["paused, s", "number more"], ["samples", "number"], ["running", "number more"], ["waiting", "number more"], ["KV cache", "number more"], ["since", "keep"], ["reason"]],
    now.engines.map((engine) => [engine.name, engine.state, `v${engine.version}`, short(engine.update_s), short(engine.pause_s),
      ...(engine.load_at ? [engine.samples, engine.running, engine.waiting, `${short(100 * engine.cache_usage, 1)} %`] : ["", "", "", ""]),
      engine.since ? clock(engine.since) : "", engine.reason]));
  fillTable(at("processes"), [["process"], ["node", "more"], ["state", "keep"], ["restarts", "number"], ["since", "keep"], ["reason"]],
    now.processes.map((process) => [process.name, process.node, stateOf(process, now.ended),
      process.restarts, clock(process.since), process.reason]));
  at("lines").replaceChildren(...now.lines.slice().reverse().map(([time, text]) => make("li", `${clock(time)}  ${text}`)));
}

function drawTime() {
  const found = state.times;
  const whole = Object.values(found.totals).reduce((sum, seconds) => sum + seconds, 0);
  at("time-sum").textContent = whole ? `${short(whole, 1)} s in ${found.num_steps} steps. Each second has one part, so the parts add up.` : "No step has ended yet.";
  const lines = Object.entries(found.totals).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]).map(([part, seconds]) => {
    const cell = make("td", undefined, "bar");
    const fill = make("div", undefined, "fill");
    fill.style.width = `${(100 * seconds) / whole}%`;
    cell.append(fill);
    let [most, name] = [0, ""];
    for (const of of times.values()) {
      if ((of.parts[part] || 0) > most) [most, name] = [of.parts[part], `${of.what === "step" ? `step ${of.step}` : of.what}: ${short(of.parts[part])} s${of.worst[part] ? `, ${of.worst[part]}` : ""}`];
    }
    const theirs = state.other ? [short(state.other.times.totals[part] || 0)] : [];
    return [part, short(seconds), `${short((100 * seconds) / whole, 1)} %`, ...theirs, cell, name, found.parts[part]];
  });
  const heads = [["part", "keep"], ["seconds", "number"], ["share", "number"]];
  if (state.other) heads.push([`seconds of ${state.other.run}`, "number"]);
  fillTable(at("parts"), [...heads, ["", "bar"], ["most in"], ["the time in which", "more"]], lines);
  const steps = [...times.values()].filter((step) => step.what === "step" || step.what === "replay").sort((a, b) => a.begin - b.begin);
  const names = Object.keys(found.parts).filter((part) => steps.some((step) => step.parts[part] > 0));
  if (!steps.length) return;
  const columns = names.map((part) => steps.map((step) => step.parts[part] || 0));
  draw(at("steps"), names, [steps.map((step) => step.step), ...stacked(columns)], {
    stacked: true, height: 280, value: (chart, value, series, row) => value === null || row === null ? "" : `${short(columns[series - 1][row])} s`,
  });
}

function drawLedger() {
  const ledger = state.ledger;
  const [issued, ...parts] = BOOKS;
  at("books").textContent = `${ledger.books[issued]} issued = ${parts.map((name) => `${ledger.books[name]} ${name.replace("_", " ")}`).join(" + ")}`;
  fillTable(at("stages"), [["state"], ["groups", "number"], ["ids"]], Object.entries(ledger.stages).filter(([, stage]) => stage.count).map(([name, stage]) =>
    [name.replace("_", " "), stage.count, groupLinks(stage.groups, stage.count > stage.groups.length)]));
  const reasons = ["dropped", "failed"].flatMap((outcome) => Object.entries(ledger[outcome]).map(([reason, count]) => [outcome, reason, count]));
  fillTable(at("reasons"), [["outcome"], ["reason"], ["groups", "number"]], reasons);
  fillTable(at("endings"), [["time"], ["outcome"], ["reason"], ["ids"]], ledger.endings.map((ending) =>
    [clock(ending.time), ending.outcome, ending.reason, groupLinks(ending.group_ids, false)]));
}

function groupLinks(ids, more) { // each opens the samples of its group
  const cell = make("td");
  for (const id of ids) {
    const link = make("a", id);
    link.href = `#group=${id}`;
    cell.append(...(cell.firstChild ? [", "] : []), link);
  }
  if (more) cell.append(", ...");
  return cell;
}

function drawSettings() {
  drawValues("settings", "key", settings, state.other && state.other.settings);
  drawValues("versions", "node and name", versions, state.other && state.other.versions);
}

function drawValues(id, title, ours, theirs) {
  if (!theirs) {
    fillTable(at(id), [[title, "keep"], ["value"]], Object.entries(ours));
    return;
  }
  const keys = [...new Set([...Object.keys(ours), ...Object.keys(theirs)])].filter((key) => ours[key] !== theirs[key]);
  const lines = keys.map((key) => [key, ours[key] ?? "", theirs[key] ?? ""]);
  fillTable(at(id), [[`${title} that differs`, "keep"], [state.now.run], [state.other.run]], lines);
}

const DRAW = {
  curves: drawCurves, now: drawNow, time: drawTime, timeline: drawTimeline, advice: () => drawAdvice(state), samples: drawSamples, ledger: drawLedger, settings: drawSettings,
};

// tabs

function chosen() {
  const name = location.hash.slice(1);
  if (name.startsWith("group=")) return "samples";
  return TABS.includes(name) ? name : TABS[0];
}

const isTyping = (event) => ["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey;

function show() {
  const tab = chosen();
  for (const name of TABS) {
    at(`view-${name}`).hidden = name !== tab;
    at(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
    at(`tab-${name}`).tabIndex = name === tab ? 0 : -1;
  }
  at("tab-advice").textContent = state && state.advice.length ? `Advice (${state.advice.length})` : "Advice";
  if (!state) return;
  drawHealth(state, [...rows.keys()].sort((a, b) => b - a), rows, known);
  const hides = isPast() && ["now", "ledger"].includes(tab);
  at("past").textContent = hides ? `What is shown here are states: they follow once the whole log is read (${readingLine()}).` : "";
  at(`view-${tab}`).hidden = hides;
  if (!hides) DRAW[tab]();
}

function choose(tab, focus) {
  location.hash = tab;
  show();
  scrollTo(0, 0); // the views differ in height
  if (focus) at(`tab-${tab}`).focus();
}

for (const tab of TABS) at(`tab-${tab}`).addEventListener("click", () => choose(tab, false));
at("tabs").addEventListener("keydown", (event) => {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move) choose(TABS[(TABS.indexOf(chosen()) + move + TABS.length) % TABS.length], true);
});
document.addEventListener("keydown", (event) => {
  const tab = TABS[Number(event.key) - 1];
  if (tab && !isTyping(event)) choose(tab, true);
});
for (const id of ["search", "smooth"]) at(id).addEventListener("input", () => state && drawCurves());
window.addEventListener("hashchange", hashChanged);
window.addEventListener("resize", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);

// updates

// Until the whole log is read, the states of groups and processes are those of the past.
const isPast = () => state.share_read !== null;
const readingLine = () => `reading the log, ${Math.floor(100 * state.share_read)} %`;

function status(text, lost) {
  at("status").textContent = text;
  at("status").className = lost ? "lost" : "";
}

function thin(table) { // a table by step, of a page that is open for a long time
  if (table.size <= KEPT_STEPS) return;
  const keys = [...table.keys()].sort((a, b) => a - b);
  for (let index = 0; index < keys.length - 1; index += 2) table.delete(keys[index]);
}

function take(text) {
  state = JSON.parse(text);
  isLost = false;
  settings = state.settings || settings;
  versions = state.versions || versions;
  const now = state.now;
  if (state.whole) {
    rows.clear();
    known.clear();
    times.clear();
  }
  for (const row of state.rows) {
    rows.set(row.step, row);
    for (const name of Object.keys(row)) known.add(name);
  }
  for (const row of state.other ? state.other.rows : []) others.set(row.step, row);
  for (const step of state.times.steps) times.set(step.begin, step);
  for (const table of [rows, times]) thin(table);
  at("title").textContent = now.run || "Physarum";
  document.title = `${now.run} · Physarum`;
  const steps = now.num_steps ? `step ${now.step} of ${now.num_steps}` : `${now.step} steps`;
  const late = now.first_seq > 1 ? `; the log begins at event ${now.first_seq}, and earlier ones are not archived here` : "";
  const missing = now.problems.map((problem) => `; ${problem}`).join("");
  if (state.problem) {
    status(state.problem, true);
    show();
    return;
  }
  if (isPast()) {
    status(`${readingLine()}, up to step ${now.step}`, false);
    show();
    return;
  }
  status(`${now.ended || state.health.state}, ${steps}, weights v${now.weights.held}, ${now.num_events} events${late}${missing}`, Boolean(missing));
  show();
}

let source = null;

async function listen() {
  let path;
  try {
    path = await ticketed("/events");
  } catch (error) {
    lost(error);
    return;
  }
  if (source) source.close();
  source = new EventSource(path);
  source.onmessage = (message) => take(message.data);
  source.onerror = () => lost(null); // the browser would try again with the same ticket
}

function lost(error) {
  if (source) source.close();
  source = null;
  if (error instanceof NoSecret) {
    status("This tab does not have the page's secret, or it was renewed: open the URL that watch RUN --url prints.", true);
  } else if (!(state && state.closing)) { // else the page ended with the run, whose end it has sent
    status("The connection is lost; it is tried again.", true);
  }
  isLost = true;
  showLost();
  setTimeout(() => source || listen(), AGAIN_MS);
}

function showLost() {
  if (state) {
    show();
    return;
  }
  const badge = make("span", `${MARKS[LOST]} ${LOST}`, "badge");
  badge.dataset.state = LOST;
  at("health-state").replaceChildren(badge);
}

function hashChanged() { // also by a new URL in this tab
  if (takeSecret()) listen();
  show();
}

if (at("state")) { // a report: one file with all that it shows
  take(at("state").textContent);
} else {
  takeSecret();
  listen();
  show();
}
