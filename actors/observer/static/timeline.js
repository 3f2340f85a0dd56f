// The view "timeline": what each part of the run did, in lanes. Selecting a group highlights it in all lanes.
"use strict";

const TIMELINE_LANES = [ // name, and colour by kind of span
  ["step", {
    "part start": "#7b8794", "part rollout": "#1a73e8", "part long tail": "#174ea6", "part queue": "#9aa0a6",
    "part scores": "#a142f4", "part filter": "#129eaf", "part wait": "#bdc1c6", "part fetch": "#b06000",
    "part train": "#188038", "part weights": "#e8710a", "part blocked": "#9c166b", "part memory": "#5f6368",
    "part evaluation": "#d93025", "part checkpoint": "#e37400", "part faults": "#c5221f", "part end": "#7b8794",
    "part unexplained": "#dadce0",
  }], // what the time of each step went into, as in the view Time
  ["queue", { queue: "#9aa0a6" }],
  ["rollout", { rollout: "#1a73e8", halted: "#7b8794" }],
  ["score", { scores: "#a142f4", filter: "#129eaf" }],
  ["weights", { update: "#e8a33d" }],
  ["evaluation", { evaluation: "#d93025" }],
  ["checkpoint", { checkpoint: "#7b8794" }],
  ["down", { down: "#c5221f" }],
];
const TIMELINE_NEEDED = 6; // lanes that are shown without a span
const TIMELINE_AGAIN_MS = 2000; // at most so often a run that goes on is read again
const TIMELINE_MAX_STEPS = 200;
const LANE_TITLE = 18; // pixels
const AXIS = 22;
const MAX_BAR_ROWS = 40; // of a lane; further spans share rows

const timeline = {
  last: 0, steps: 5, // shown; last 0: the newest one
  data: null, bars: [], places: [], selected: null,
  busy: false, again: false, readAt: 0, later: null, problem: "",
};

async function readTimeline() {
  if (timeline.busy) {
    timeline.again = true;
    return;
  }
  timeline.busy = true;
  timeline.readAt = Date.now();
  try {
    const response = await fetched(`/timeline?last=${timeline.last}&steps=${timeline.steps}`);
    if (!response.ok) throw new Error(await response.text());
    timeline.data = await response.json();
    timeline.problem = "";
  } catch (error) {
    timeline.problem = `The timeline cannot be read: ${error.message}`;
  }
  timeline.busy = false;
  paintTimeline();
  if (timeline.again) {
    timeline.again = false;
    readTimeline();
  }
}

function ofReport() { // a report has one window, of which the page shows a part
  const whole = state.timeline;
  const newest = timeline.last ? Math.min(Math.max(timeline.last, whole.first), whole.last) : whole.last;
  const first = Math.max(whole.first, newest - timeline.steps + 1);
  const steps = whole.steps.filter(([number]) => number >= first && number <= newest);
  if (!steps.length) return whole;
  const begin = Math.min(...steps.map((step) => step[1]));
  const end = timeline.last ? Math.max(...steps.map((step) => step[2])) : whole.end;
  const bars = whole.bars.filter((bar) => bar[4] >= begin && bar[3] <= end);
  return { ...whole, oldest: whole.first, newest: whole.last, first, last: newest, begin, end, steps, bars };
}

function drawTimeline() {
  if (state.timeline) {
    timeline.data = ofReport();
    paintTimeline();
    return;
  }
  const rest = timeline.readAt + TIMELINE_AGAIN_MS - Date.now();
  if (!timeline.data || (timeline.last === 0 && rest <= 0)) {
    readTimeline();
    return;
  }
  paintTimeline();
  if (timeline.last === 0 && timeline.later === null) { // what came since it was read
    timeline.later = setTimeout(() => {
      timeline.later = null;
      if (timeline.last === 0) readTimeline();
    }, rest);
  }
}

function askTimeline() { // after a change of what is shown
  if (state && state.timeline) drawTimeline();
  else readTimeline();
}

function timelineLanes() {
  return TIMELINE_LANES.map(([name, colours], index) => {
    const bars = timeline.bars.filter((bar) => colours[bar.kind]).sort((a, b) => a.begin - b.begin);
    const ends = []; // of the last bar in each row
    for (const bar of bars) {
      let row = ends.findIndex((end) => end <= bar.begin);
      if (row < 0) row = ends.length < MAX_BAR_ROWS ? ends.length : bar.group >= 0 ? bar.group % MAX_BAR_ROWS : 0;
      bar.row = row;
      ends[row] = Math.max(ends[row] || 0, bar.end);
    }
    const rows = Math.max(1, ends.length);
    return { name, colours, bars, rows, size: rows > 12 ? 5 : rows > 4 ? 8 : 14, shown: index < TIMELINE_NEEDED || bars.length > 0 };
  }).filter((lane) => lane.shown);
}

function relatedTo(bar) { // whether a bar belongs to the selected group: its own, its step's, or its weights
  const group = timeline.selected;
  if (group === null || !group.isShown) return true;
  if (bar.group >= 0) return bar.group === group.number;
  if (bar.kind === "update") return bar.versions[0] >= group.versions[0] && bar.versions[0] <= group.versions[1] && group.versions[1] > 0;
  return group.step > 0 && bar.step === group.step;
}

function paintTimeline() {
  const data = timeline.data;
  if (chosen() !== "timeline") return;
  const canvas = at("timeline-canvas");
  if (!data || !data.steps.length) {
    at("timeline-state").textContent = timeline.problem || (data ? "No step has been trained yet." : "reading");
    canvas.hidden = true;
    return;
  }
  canvas.hidden = false;
  timeline.bars = data.bars.map(([kind, where, name, begin, end, group, step, versions]) => ({ kind: kind === "part" ? `part ${name}` : kind, where, name, begin, end, group, step, versions }));
  reselect();
  const lanes = timelineLanes();
  const width = Math.max(120, canvas.parentElement.clientWidth - 2);
  const height = AXIS + lanes.reduce((sum, lane) => sum + LANE_TITLE + lane.rows * lane.size + 6, 0);
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const scale = width / Math.max(1e-9, data.end - data.begin);
  const x = (time) => (time - data.begin) * scale;
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "top";
  let free = -1; // where the next label of a step may begin
  for (const [number, begin, end] of data.steps) {
    pen.fillStyle = colour("--line");
    pen.fillRect(Math.round(x(end)), 0, 1, height);
    const label = data.steps.length > 1 ? String(number) : `step ${number}`;
    if (x(begin) >= free) {
      pen.fillStyle = colour("--faint");
      pen.fillText(label, x(begin) + 3, 5);
      free = x(begin) + pen.measureText(label).width + 8;
    }
  }
  timeline.places = [];
  let top = AXIS;
  for (const lane of lanes) {
    pen.fillStyle = colour("--line");
    pen.fillRect(0, top, width, 1);
    pen.fillStyle = colour("--text");
    pen.globalAlpha = 1;
    pen.fillText(lane.name, 4, top + 3);
    for (const bar of lane.bars) {
      const left = Math.max(0, x(bar.begin));
      const place = { bar, left, top: top + LANE_TITLE + bar.row * lane.size, width: Math.max(1, Math.min(width, x(bar.end)) - left), height: lane.size - 1 };
      const related = relatedTo(bar);
      pen.globalAlpha = related ? 1 : 0.15;
      pen.fillStyle = lane.colours[bar.kind];
      pen.fillRect(place.left, place.top, place.width, place.height);
      if (timeline.selected && related && bar.group >= 0) {
        pen.strokeStyle = colour("--text");
        pen.strokeRect(place.left - 1, place.top - 1, place.width + 2, place.height + 2);
      }
      timeline.places.push(place);
    }
    pen.globalAlpha = 1;
    top += LANE_TITLE + lane.rows * lane.size + 6;
  }
  describeTimeline(data);
}

function describeTimeline(data) {
  const steps = data.first === data.last ? `step ${data.last}` : `steps ${data.first} to ${data.last}`;
  const left = data.left_out ? ` The ${data.left_out} shortest spans are left out: show fewer steps.` : "";
  const kept = data.oldest > 1 ? ` Spans are kept from step ${data.oldest} on.` : "";
  at("timeline-state").textContent = timeline.problem || `${steps} of ${data.newest}, ${short(data.end - data.begin, 1)} s. A span is shown once it has ended.${left}${kept}`;
  at("timeline-older").disabled = data.first <= data.oldest;
  at("timeline-newer").disabled = timeline.last === 0;
  at("timeline-fewer").disabled = timeline.steps <= 1;
  at("timeline-more").disabled = timeline.steps >= TIMELINE_MAX_STEPS || data.first <= data.oldest;
}

// a selected group

function reselect() { // what is known of the selected group may have grown
  if (timeline.selected) select(timeline.selected.number, false);
}

function select(number, paint = true) {
  if (number === null) {
    timeline.selected = null;
    at("timeline-span").replaceChildren();
  } else {
    const bars = timeline.bars.filter((bar) => bar.group === number).sort((a, b) => a.begin - b.begin);
    const last = bars.filter((bar) => bar.versions[1] > 0).pop();
    timeline.selected = { number, isShown: bars.length > 0, step: Math.max(0, ...bars.map((bar) => bar.step)), versions: last ? last.versions : [0, 0] };
    showGroup(bars);
  }
  if (paint) paintTimeline();
}

function showGroup(bars) {
  const { number, step, versions } = timeline.selected;
  const title = make("h2", `group ${number}`);
  if (!bars.length) {
    at("timeline-span").replaceChildren(title, make("p", "It has no span in these steps."));
    return;
  }
  const begin = bars[0].begin;
  const table = make("table");
  fillTable(table, [["part"], ["from, s", "number"], ["to, s", "number"], ["took, s", "number"], ["on"]], bars.map((bar) =>
    [bar.name, short(bar.begin - begin), short(bar.end - begin), short(bar.end - bar.begin), bar.where]));
  const scroll = make("div", undefined, "scroll");
  scroll.append(table);
  const trained = step ? `in the batch of step ${step}` : "in no batch";
  const weights = versions[1] ? `, sampled with weights ${versions[0] === versions[1] ? `v${versions[1]}` : `v${versions[0]} to v${versions[1]}`}` : "";
  const link = make("a", "its samples");
  link.href = `#group=${number}`;
  const more = make("p", `begun at ${clock(begin)}, ${trained}${weights}; `);
  more.append(link);
  at("timeline-span").replaceChildren(title, more, scroll);
}

function showBar(bar) {
  const where = bar.where ? ` on ${bar.where}` : "";
  const step = bar.step ? ` of step ${bar.step}` : "";
  const text = `${bar.name}${where}${step}: ${short(bar.end - bar.begin)} s, from ${clock(bar.begin)}`;
  timeline.selected = null;
  at("timeline-span").replaceChildren(make("p", text));
  paintTimeline();
}

function barAt(event) {
  const box = at("timeline-canvas").getBoundingClientRect();
  const [left, top] = [event.clientX - box.left, event.clientY - box.top];
  const inside = (place) => left >= place.left - 2 && left <= place.left + place.width + 2 && top >= place.top - 1 && top <= place.top + place.height + 1;
  return timeline.places.findLast(inside)?.bar;
}

function moveTimeline(steps) {
  const data = timeline.data;
  if (!data || !data.steps.length) return;
  const last = Math.max(data.oldest, data.last + steps);
  timeline.last = last >= data.newest ? 0 : last;
  askTimeline();
}

function zoomTimeline(factor) {
  timeline.steps = Math.min(TIMELINE_MAX_STEPS, Math.max(1, Math.round(timeline.steps * factor)));
  askTimeline();
}

function nextGroup(move) {
  const numbers = [...new Set(timeline.bars.filter((bar) => bar.group >= 0).map((bar) => bar.group))].sort((a, b) => a - b);
  if (!numbers.length) return;
  const known = timeline.selected ? numbers.indexOf(timeline.selected.number) : -1;
  const index = known < 0 ? (move > 0 ? 0 : numbers.length - 1) : Math.min(numbers.length - 1, Math.max(0, known + move));
  select(numbers[index]);
}

document.getElementById("timeline-older").addEventListener("click", () => moveTimeline(-timeline.steps));
document.getElementById("timeline-newer").addEventListener("click", () => moveTimeline(timeline.steps));
document.getElementById("timeline-fewer").addEventListener("click", () => zoomTimeline(0.5));
document.getElementById("timeline-more").addEventListener("click", () => zoomTimeline(2));
document.getElementById("timeline-number").addEventListener("change", (event) => {
  const text = event.target.value.trim();
  select(/^\d+$/.test(text) ? Number(text) : null);
});
document.getElementById("timeline-canvas").addEventListener("click", (event) => {
  const bar = barAt(event);
  if (!bar) select(null);
  else if (bar.group >= 0) select(bar.group);
  else showBar(bar);
});
document.getElementById("timeline-canvas").addEventListener("mousemove", (event) => {
  const bar = barAt(event);
  event.target.title = bar ? `${bar.group >= 0 ? `group ${bar.group}, ` : ""}${bar.name}, ${short(bar.end - bar.begin)} s` : "";
});
document.getElementById("timeline-canvas").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const act = {
    ArrowLeft: () => moveTimeline(-timeline.steps),
    ArrowRight: () => moveTimeline(timeline.steps),
    ArrowUp: () => nextGroup(-1),
    ArrowDown: () => nextGroup(1),
    "+": () => zoomTimeline(0.5),
    "-": () => zoomTimeline(2),
    Escape: () => select(null),
    Enter: () => {
      if (timeline.selected) location.hash = `group=${timeline.selected.number}`;
    },
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
