"use strict";
// The page holds one state, changed by what /events pushes, and draws at most once a frame what changed.
// Every text comes in by textContent: names and causes are others' words.

const state = {cluster: null, tasks: new Map(), nodes: new Map(), incidents: new Map()};
const dirty = {cluster: false, tasks: false, nodes: new Set(), layout: false, incidents: false};
let chosen = "";       // an incident's id; "" follows the newest
let isChosenByHand = false;
let nowMs = 0;
const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------- what arrives

function take(message, isWhole) {
  for (const part of ["tasks", "nodes", "incidents"]) {
    if (isWhole) { state[part].clear(); dirty.layout = true; }
    for (const [name, entry] of Object.entries(message[part] || {})) {
      const isKnown = state[part].has(name);
      if (entry === null) state[part].delete(name); else state[part].set(name, entry);
      if (part === "nodes") {
        dirty.nodes.add(name);
        if (entry === null || !isKnown) dirty.layout = true;
      }
    }
    if (part !== "nodes" && (isWhole || message[part])) dirty[part] = true;
  }
  if (message.cluster) { state.cluster = message.cluster; dirty.cluster = true; }
  nowMs = message.now_ms || (state.cluster ? state.cluster.now_ms : 0);
  requestDraw();
}

function say(what, text) {
  const link = byId("link");
  link.dataset.state = what;
  link.textContent = text || what;
}

function listen() {
  const source = new EventSource("events");
  source.addEventListener("state", (event) => { say("live"); take(JSON.parse(event.data), true); });
  source.addEventListener("change", (event) => { say("live"); take(JSON.parse(event.data), false); });
  source.addEventListener("stale", (event) => say("stale", JSON.parse(event.data).why));
  source.onerror = () => {
    say("lost", "no coordinator: trying again");
    if (source.readyState === EventSource.CLOSED) { source.close(); setTimeout(listen, 2000); }
  };
}

let isAsked = false;
function requestDraw() {
  if (!isAsked) { isAsked = true; requestAnimationFrame(() => { isAsked = false; draw(); }); }
}

function draw() {
  if (dirty.cluster) drawCluster();
  if (dirty.tasks) { drawTasks(); drawLegend(); }
  if (dirty.layout || dirty.tasks) drawMap(); else if (dirty.nodes.size) drawNodes(dirty.nodes);
  if (dirty.layout || dirty.nodes.size) drawNodeCounts();
  if (dirty.incidents) { drawIncidents(); drawIncident(); }
  dirty.cluster = dirty.tasks = dirty.layout = dirty.incidents = false;
  dirty.nodes.clear();
}

// ---------------------------------------------------------------- words

const UNITS = [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
function si(value) {
  if (!value) return "0";
  const [unit, size] = UNITS.find(([, each]) => value >= each) || ["", 1];
  return (value / size).toPrecision(3) + unit;
}
const known = (value, digits) => value === null || value === undefined ? "" : value.toFixed(digits);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(cells) {
  const made = element("tr");
  for (const cell of cells) made.append(cell instanceof Node ? cell : element("td", cell));
  return made;
}

// ---------------------------------------------------------------- cluster

function drawCluster() {
  const cluster = state.cluster, cost = cluster.cost, decision = cluster.allocation;
  byId("sums").textContent = `${cluster.used} of ${cluster.slots} slots in use · ${si(cluster.waf)}FLOP/s weighted · ` +
    `term ${cluster.term} · ${cluster.incidents} incidents, ${cost.total_gpu_s.toFixed(1)} GPU-s ` +
    `(detection ${cost.detection_gpu_s.toFixed(1)}, transition ${cost.transition_gpu_s.toFixed(1)}, ` +
    `sub-healthy ${cost.sub_healthy_gpu_s.toFixed(1)})`;
  if (decision.number) {
    const widths = Object.entries(decision.slots).map(([task, slots]) => `${task}: ${slots}`).join(", ");
    byId("decision").textContent = `${decision.number} (${decision.from_table ? "from the table" : "solved"}): ` +
      `${decision.trigger}: ${decision.reason}${widths ? ` · slots: ${widths}` : ""}`;
  }
  drawWaf(cluster.waf_over_time);
}

function drawWaf(points) {
  const svg = byId("waf"), width = 240, height = 28;
  svg.replaceChildren();
  const most = Math.max(0, ...points.map(([, waf]) => waf));
  if (!most || points.length < 2) return;
  const first = points[0][0], span = Math.max(1, nowMs - first);
  const x = (at) => (at - first) / span * width, y = (waf) => height - 1 - waf / most * (height - 2);
  let path = `M0 ${y(points[0][1])}`;
  for (const [at, waf] of points.slice(1)) path += `H${x(at)}V${y(waf)}`;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path + `H${width}`);
  line.setAttribute("fill", "none");
  line.setAttribute("stroke", "currentColor");
  svg.append(line);
}

// ---------------------------------------------------------------- tasks

const hues = new Map();  // a task keeps its colour as long as the page lives
function hue(task) {
  if (!hues.has(task)) hues.set(task, Math.round(210 + hues.size * 137.508) % 360);
  return hues.get(task);
}
const LIGHT = {training: 48, recovering: 70, starting: 82, ending: 88, hurt: 35};
const colour = (task, condition) => condition === "hurt" ? "#e00" :
  `hsl(${hue(task)} ${condition === "training" ? 65 : 40}% ${LIGHT[condition] || 60}%)`;

function drawTasks() {
  const body = byId("tasks").tBodies[0];
  body.replaceChildren(...[...state.tasks.values()].map((task) => {
    const swatch = element("td"), mark = element("span", "", "swatch");
    mark.style.background = colour(task.task, "training");
    swatch.append(mark);
    const rate = task.iteration_s ? task.samples / task.iteration_s : null;
    return row([
      swatch, task.task, task.phase, task.slots === task.target ? task.slots : `${task.slots} → ${task.target}`,
      task.iteration < 0 ? "" : task.iteration, known(task.loss, 4), known(task.iteration_s, 3), known(rate, 1),
      si(task.waf), known(task.ettr, 3), task.why || task.cause,
    ]);
  }));
}

function drawLegend() {
  const conditions = ["training", "recovering", "starting", "ending", "hurt"];
  const first = state.tasks.size ? state.tasks.keys().next().value : "";
  const items = conditions.map((each) => [colour(first, each), each]);
  items.push(["#8883", "free slot"], [FRAMES.suspect, "node suspect"], [FRAMES.lost, "lost"], [FRAMES.drained, "drained"],
    [FRAMES.unfit, "unfit"]);
  byId("legend").replaceChildren(...items.map(([paint, text]) => {
    const item = element("li"), mark = element("span", "", "swatch");
    mark.style.background = paint;
    item.append(mark, ` ${text}`);
    return item;
  }));
}

// ---------------------------------------------------------------- nodes

const FRAMES = {up: "#0000", awaited: "#8888", suspect: "#e90", lost: "#d33", drained: "#888", unfit: "#a3a"};
const map = {names: [], at: new Map(), columns: 1, cell: 10, slots: 1, width: 0, height: 0, paint: null};

function measure() {
  map.names = [...state.nodes.keys()].sort((a, b) => a.length - b.length || (a < b ? -1 : 1));
  map.at = new Map(map.names.map((name, index) => [name, index]));
  map.slots = Math.max(1, ...[...state.nodes.values()].map((node) => node[1] + node[2].length));
  const many = map.names.length;
  map.cell = many > 2000 ? 5 : many > 200 ? 8 : 16;  // of a slot
  const across = Math.ceil(Math.sqrt(map.slots)), down = Math.ceil(map.slots / across);
  map.across = across;
  map.width = across * map.cell + 4;
  map.height = down * map.cell + 4;
  map.columns = Math.max(1, Math.floor((byId("map-box").clientWidth - 20) / map.width));
}

function drawMap() {
  measure();
  const canvas = byId("map"), scale = window.devicePixelRatio || 1;
  const width = map.columns * map.width, height = Math.ceil(map.names.length / map.columns) * map.height;
  canvas.width = width * scale;
  canvas.height = Math.max(1, height) * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  map.paint = canvas.getContext("2d");
  map.paint.setTransform(scale, 0, 0, scale, 0, 0);
  drawNodes(map.names);
}

function drawNodes(names) {
  const paint = map.paint;
  for (const name of names) {
    const index = map.at.get(name), node = state.nodes.get(name);
    if (index === undefined || !node) continue;
    const [condition, free, held] = node;
    const left = index % map.columns * map.width, top = Math.floor(index / map.columns) * map.height;
    paint.clearRect(left, top, map.width, map.height);
    paint.fillStyle = FRAMES[condition] || "#000";
    paint.fillRect(left, top, map.width - 1, map.height - 1);
    for (let slot = 0; slot < free + held.length; slot++) {
      const x = left + 1 + slot % map.across * map.cell, y = top + 1 + Math.floor(slot / map.across) * map.cell;
      paint.clearRect(x, y, map.cell, map.cell);
      paint.fillStyle = condition === "lost" ? "#d336" : slot < held.length ? colour(held[slot][0], held[slot][2]) : "#8883";
      paint.fillRect(x, y, map.cell - 1, map.cell - 1);
    }
  }
}

function drawNodeCounts() {
  const counts = new Map();
  for (const [condition] of state.nodes.values()) counts.set(condition, (counts.get(condition) || 0) + 1);
  byId("node-counts").textContent = [...counts].map(([condition, count]) => `${count} ${condition}`).join(", ");
}

byId("map").addEventListener("mousemove", (event) => {
  const column = Math.floor(event.offsetX / map.width), line = Math.floor(event.offsetY / map.height);
  const name = column < map.columns ? map.names[line * map.columns + column] : undefined;
  const node = name === undefined ? undefined : state.nodes.get(name);
  if (!node) return;
  const [condition, free, held, warm, why] = node;
  const slots = held.map(([task, rank, what]) => `${task} rank ${rank} ${what}`).join(", ");
  byId("node").textContent = `${name}: ${condition}${why ? ` (${why})` : ""}; ${slots || "nothing runs"}; ` +
    `${free} free, ${warm} warm`;
});
window.addEventListener("resize", () => { dirty.layout = true; requestDraw(); });

// ---------------------------------------------------------------- incidents

function drawIncidents() {
  const all = [...state.incidents.values()].sort((a, b) => b.id.slice(1) - a.id.slice(1));
  const open = all.filter((each) => !each.outcome).length;
  byId("incident-counts").textContent = `${all.length} shown, ${open} open`;
  if (!isChosenByHand || !state.incidents.has(chosen)) chosen = all.length ? all[0].id : "";
  byId("incidents").tBodies[0].replaceChildren(...all.map((each) => {
    const place = each.root.rank < 0 ? each.root.node : `${each.root.node} rank ${each.root.rank}`;
    const made = row([
      each.id, each.task, element("td", each.severity, each.severity), each.fault, place, each.outcome || "open",
      each.cost.total_gpu_s.toFixed(1),
    ]);
    made.dataset.id = each.id;
    made.tabIndex = 0;
    made.ariaSelected = String(each.id === chosen);
    return made;
  }));
}

function choose(event) {
  const made = event.target.closest("tr[data-id]");
  if (!made || (event.type === "keydown" && event.key !== "Enter")) return;
  chosen = made.dataset.id;
  isChosenByHand = true;
  dirty.incidents = true;
  requestDraw();
}
byId("incidents").addEventListener("click", choose);
byId("incidents").addEventListener("keydown", choose);

function drawIncident() {
  const box = byId("incident"), incident = state.incidents.get(chosen);
  box.replaceChildren(element("h2", incident ? `Timeline of ${incident.id}` : "Timeline"));
  if (!incident) { box.append(element("p", "No incident.")); return; }
  box.append(element("p", `${incident.fault}: ${incident.meaning || incident.cause}`));
  const list = element("ol"), start = incident.timeline.length ? incident.timeline[0][0] : 0;
  for (const [at, text] of incident.timeline) {
    const item = element("li");
    item.append(element("b", `+${(at - start).toFixed(1)} ms`), ` ${text}`);
    list.append(item);
  }
  box.append(list);
  const facts = element("dl"), cost = incident.cost;
  const fact = (name, value) => { if (value !== null && value !== "") facts.append(element("dt", name), element("dd", value)); };
  fact("detected after", incident.detect_ms === null ? null : `${incident.detect_ms.toFixed(1)} ms`);
  fact("decided after", incident.decide_ms === null ? null : `${incident.decide_ms.toFixed(1)} ms`);
  fact("next iteration committed after", incident.resume_ms === null ? "not yet" : `${incident.resume_ms.toFixed(1)} ms`);
  fact("cost", `${cost.total_gpu_s.toFixed(2)} GPU-s: detection ${cost.detection_gpu_s.toFixed(2)}, transition ` +
    `${cost.transition_gpu_s.toFixed(2)}, sub-healthy ${cost.sub_healthy_gpu_s.toFixed(2)}`);
  fact("iterations lost", incident.iterations_lost ?? "-");
  fact("micro-batches again", incident.micro_batches_recomputed);
  fact("state from", incident.state_source);
  fact("plan", incident.kind);
  fact("cause", incident.cause);
  fact("text", incident.text);
  fact("memory", incident.memory ?? "");
  fact("log", incident.log);
  box.append(facts);
}

listen();
