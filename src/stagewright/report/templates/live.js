"use strict";
const COLUMNS = 100, COLUMN = 3, SAMPLE_MS = 100, STRIP_MS = 500, CHART_MS = 1000;
const ENDED = ["done", "failed", "refused", "interrupted", "killed"];
const STATUS = {waiting: "waiting for the run", starting: "starting", running: "running", done: "finished", failed: "failed",
  refused: "refused", interrupted: "interrupted", killed: "killed"};
const CONDITION = {absent: "not started", elsewhere: "on another host", stopped: "stopped", gone: "process gone", ended: "ended",
  broken: "failed", lost: "lost its connection"};
const KINDS = [["forward", "forward"], ["backward", "backward"], ["wait", "waiting"], ["collective", "collective"],
  ["optimizer", "optimizer"], ["prepare", "other"]];
const byId = id => document.getElementById(id);
let state = null, source = null, replaying = false, lastChart = 0, lastShown = 0, planned = 0, boxes = [], drawn = false;

// ── number formats
const digits = n => Math.abs(n) >= 100 ? n.toFixed(0) : Math.abs(n) >= 10 ? n.toFixed(1) : n.toFixed(2);
function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (Math.abs(n) < 1024) return (unit === "B" ? n : digits(n)) + " " + unit; n /= 1024; }
  return digits(n) + " TiB";
}
function seconds(n) {
  if (n > 0 && n < 1) return (1000 * n).toFixed(0) + " ms";
  if (n < 60) return (n < 10 ? n.toFixed(1) : n.toFixed(0)) + " s";
  const whole = Math.round(n), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}
const percent = n => (100 * n).toFixed(0) + " %";
function put(element, text) { if (element.textContent !== text) element.textContent = text; }
function figure(id, number, unit) {  // a number with its unit
  const element = byId(id), text = number + "\u0000" + (unit || "");
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.textContent = number;
  if (unit) { const small = document.createElement("small"); small.textContent = " " + unit; element.append(small); }
}
function make(name, parent, kind) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (parent) parent.append(element);
  return element;
}

// ── colors: resolved once, and again when the color scheme changes
let palette = {};
function color(name) {
  if (!palette[name]) palette[name] = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  return palette[name];
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette = {}; build(); render(); });
function paint(kind, stage) {
  if (kind === "forward") return color(`stage-${stage % 16}`);
  if (kind === "backward") return color(`stage-${stage % 16}-pale`);
  if (kind === "wait") return color("muted");
  if (kind === "collective") return color("share-collective");
  if (kind === "optimizer") return color("muted");
  if (kind === "prepare") return color("mark");
  return null;
}

// ── data from the server
function follow() {
  open("/events");
  replaying = false;
}
function play(from) {
  const chosen = byId("speed").value;
  replaying = true;
  open(`/events?at=${from}&speed=${chosen === "auto" ? "auto" : Number(chosen)}`);
  put(byId("play"), "Pause");
}
function open(address) {
  if (source) source.close();
  const stream = source = new EventSource(address);
  stream.addEventListener("state", event => { if (source === stream) receive(JSON.parse(event.data), true); });
  stream.addEventListener("change", event => { if (source === stream) receive(applied(state, JSON.parse(event.data)), false); });
  stream.onopen = () => { byId("offline").hidden = true; };
  stream.onerror = () => { if (source === stream && !(replaying && finished())) byId("offline").hidden = false; };
}
function applied(before, change) {  // the same as report/live/difference.py
  const after = {...before, ...change};
  if (change.workers && !Array.isArray(change.workers))
    after.workers = before.workers.map((worker, rank) => ({...worker, ...change.workers[rank]}));
  if (change.curve && !Array.isArray(change.curve)) after.curve = [...before.curve, ...change.curve.add];
  return after;
}
const finished = () => state && state.replay && state.replay.at_s >= state.replay.length_s;
function shape(snapshot) { return snapshot ? [snapshot.name, snapshot.workers.map(w => [w.stages, w.device, w.data])] : null; }
function receive(next, isWhole) {
  const rebuild = JSON.stringify(shape(state)) !== JSON.stringify(shape(next));
  state = next;
  if (rebuild) build();
  if (isWhole) lastChart = 0;
  // At most ten frames per second, or five with many workers.
  const pause = next.workers.length > 4 ? 200 : 100;
  if (!planned) planned = setTimeout(render, isWhole ? 0 : Math.max(0, lastShown + pause - performance.now()));
  if (replaying && finished()) { source.close(); put(byId("play"), "Replay"); }
}

// ── worker boxes
function build() {
  const container = byId("workers"), legend = byId("legend");
  container.textContent = legend.textContent = "";
  boxes = [];
  drawn = false;
  if (!state) return;
  const stages = state.workers.some(worker => worker.pipeline > 0), rows = new Map();
  for (const [kind, name] of KINDS) {
    const item = make("li", legend), chip = make("i", item);
    chip.style.background = kind === "wait" ? `linear-gradient(transparent 65%, ${color("muted")} 65%)` : paint(kind, 0);
    if (kind === "prepare" || kind === "wait") chip.style.borderColor = color("grid");
    item.append(name);
  }
  for (const worker of state.workers) {
    const key = stages ? `${worker.data}/${worker.tensor}` : "all";
    if (!rows.has(key)) {
      if (stages && state.workers.some(other => other.data || other.tensor))
        make("p", container, "name").textContent = `replica ${worker.data}` + (state.workers.some(o => o.tensor) ? `, TP rank ${worker.tensor}` : "");
      const row = make("ul", container, "row" + (stages ? " pipeline" : ""));
      const beside = state.workers.filter(other => !stages || (other.data === worker.data && other.tensor === worker.tensor)).length;
      row.dataset[beside <= 5 ? "few" : "many"] = "";
      rows.set(key, row);
    }
    const box = make("li", rows.get(key), "box"), bar = make("div", box, "bar");
    for (const stage of worker.stages.length ? worker.stages : [0]) make("span", bar).style.background = color(`stage-${stage % 16}`);
    const title = make("div", box), who = make("div", box, "who"), doing = make("div", box, "doing");
    const words = document.createTextNode(""), more = document.createElement("small");
    doing.append(words, more);
    make("b", title).textContent = stages ? (worker.stages.length > 1 ? "Stages " : "Stage ") + worker.stages.join(", ") : `Worker ${worker.rank}`;
    const named = stages ? [`worker ${worker.rank}`] : state.workers.some(o => o.tensor) ? [`replica ${worker.data}, TP rank ${worker.tensor}`]
      : state.workers.length > 1 ? [`replica ${worker.data}`] : [];
    who.textContent = [...named, worker.device].filter(Boolean).join(" · ");
    const canvas = make("canvas", box), facts = make("div", box, "facts");
    canvas.width = COLUMNS * COLUMN; canvas.height = 12;
    canvas.setAttribute("aria-hidden", "true");
    box.dataset.rank = worker.rank;
    boxes.push({box, words, more, canvas, samples: [], pen: canvas.getContext("2d"), waits: make("span", facts), holds: make("span", facts)});
  }
}
function showWorker(view, worker) {
  const working = worker.condition === "working";
  view.box.dataset.condition = worker.condition;
  view.box.dataset.kind = worker.kind;
  put(view.words, working ? worker.action || "idle" : CONDITION[worker.condition]);
  const more = [];
  if (worker.microbatch !== null && worker.condition !== "ended") more.push(`micro-batch ${worker.microbatch}`);
  if (worker.step !== null && !working && worker.condition !== "ended") more.push(`step ${worker.step}`);
  if (!working && worker.condition !== "ended" && worker.action) more.unshift(`at: ${worker.action}`);
  if (worker.still_s !== null) more.push(`for ${seconds(worker.still_s)}`);
  put(view.more, more.join(", "));
  put(view.waits, worker.waited === null ? "" : `waiting ${percent(worker.waited)}`);
  put(view.holds, worker.memory_bytes === null ? "" : bytes(worker.memory_bytes));
}
const moving = () => state && !document.hidden && !(replaying ? finished() : ENDED.includes(state.status));
setInterval(() => {  // the strip advances even without updates
  if (moving()) state.workers.forEach((worker, index) => boxes[index].samples.push([worker.kind, worker.stage ?? worker.stages[0] ?? 0]));
}, SAMPLE_MS);
setInterval(() => {
  for (const view of boxes) {
    const width = view.canvas.width, height = view.canvas.height, news = view.samples.splice(0).slice(-COLUMNS);
    if (!news.length) continue;
    drawn = true;
    view.pen.globalCompositeOperation = "copy";
    view.pen.drawImage(view.canvas, -COLUMN * news.length, 0);
    view.pen.globalCompositeOperation = "source-over";
    news.forEach(([kind, stage], index) => {
      const fill = paint(kind, stage), thick = kind === "wait" ? 2 : height;  // waiting is also visible without color
      if (!fill) return;
      view.pen.fillStyle = fill;
      view.pen.fillRect(width - COLUMN * (news.length - index), height - thick, COLUMN, thick);
    });
  }
}, STRIP_MS);

// ── everything else
function render() {
  clearTimeout(planned);
  planned = 0;
  lastShown = performance.now();
  if (!state) return;
  const s = state, ended = ENDED.includes(s.status);
  put(byId("name"), s.name);
  document.title = `${STATUS[s.status]} · ${s.name}`;
  byId("status").dataset.status = s.status;
  put(byId("status"), s.replay ? (finished() ? STATUS[s.status] : "replay") : STATUS[s.status]);
  const parts = [s.model, s.task && `on ${s.task}`, s.mesh, s.schedule, s.batch && `batch ${s.batch}`
    + (s.microbatches > 1 ? ` in ${s.microbatches} micro-batches` : ""), s.training === false && "inference"];
  put(byId("about"), s.model ? parts.filter(Boolean).join(" · ") : "No plan yet; the page starts with the run.");
  byId("error").hidden = !s.error;
  if (s.error) {
    put(byId("error-text"), s.error.text);
    put(byId("error-at"), s.error.at ? `at: ${s.error.at}` : "");
    byId("error-more").hidden = !s.error.traceback;
    put(byId("error-trace"), s.error.traceback || "");
  }
  put(byId("step-name"), s.epoch && s.epochs ? `step, epoch ${s.epoch} of ${s.epochs}` : "step");
  figure("step", s.step === null ? "–" : String(s.step), s.total !== null ? `of ${s.total}` : "");
  byId("progress").hidden = s.total === null;
  byId("progress").value = s.total ? (s.step || 0) / s.total : 0;
  byId("loss-tile").hidden = s.training === false;
  figure("loss", s.diverged ? "NaN" : s.loss === null ? "–" : s.loss.toPrecision(4));
  byId("loss").classList.toggle("bad", s.diverged);
  byId("metric-tile").hidden = s.metric === null;
  put(byId("metric-name"), s.metric || "");
  figure("metric", s.metric_value === null ? "–" : s.metric_value.toFixed(4));
  if (s.samples_per_s === null) figure("rate", "–"); else figure("rate", digits(s.samples_per_s), "samples/s");
  byId("bubble-tile").hidden = !s.schedule;
  figure("bubble", s.bubble === null ? "–" : percent(s.bubble));
  put(byId("memory-name"), s.workers.some((worker) => (worker.device || "").startsWith("cuda")) ? "GPU memory" : "process memory");
  if (s.memory_bytes === null) figure("memory", "–");
  else figure("memory", bytes(s.memory_bytes), s.memory_limit_bytes ? `of ${bytes(s.memory_limit_bytes)}` : "");
  put(byId("left-name"), ended ? "took" : "remaining");
  if (ended) figure("left", s.elapsed_s === null ? "–" : seconds(s.elapsed_s));
  else figure("left", s.remaining_s === null ? "–" : seconds(s.remaining_s));
  put(byId("elapsed"), ended || s.elapsed_s === null ? "" : `after ${seconds(s.elapsed_s)}`);
  byId("workers-section").hidden = !s.workers.length;
  byId("workers-section").classList.toggle("still", ended && !drawn);
  put(byId("workers-title"), replaying ? "Workers in the last 10 s of the replay"
    : ended ? "Workers" : "Workers now and in the last 10 s");
  s.workers.forEach((worker, index) => { if (boxes[index]) showWorker(boxes[index], worker); });
  player(s, ended);
  const now = performance.now();
  if (now - lastChart >= CHART_MS || ended) { lastChart = now; charts(s); }
  put(byId("foot"), s.begun ? `Started ${new Date(s.begun).toLocaleString()}. This page only reads the run folder.` : "This page only reads the run folder.");
}
function player(s, ended) {
  byId("player").hidden = !(ended || replaying) || !s.workers.length || s.status === "killed";
  byId("end").hidden = !replaying;
  if (!s.replay) { put(byId("position"), ""); byId("seek").value = 1; return; }
  byId("seek").max = Math.max(s.replay.length_s, 1e-3);
  if (document.activeElement !== byId("seek") || !byId("seek").matches(":active")) byId("seek").value = s.replay.at_s;
  put(byId("position"), `${seconds(s.replay.at_s)} of ${seconds(s.replay.length_s)}`);
}
byId("play").addEventListener("click", () => {
  if (byId("play").textContent === "Pause") { source.close(); put(byId("play"), "Resume"); return; }
  const from = state && state.replay && !finished() ? state.replay.at_s : 0;
  if (from === 0) boxes.forEach(view => view.pen.clearRect(0, 0, view.canvas.width, view.canvas.height));
  play(from);
});
byId("seek").addEventListener("change", () => play(state && state.replay ? Number(byId("seek").value) : 0));
byId("speed").addEventListener("change", () => { if (byId("play").textContent === "Pause") play(state.replay ? state.replay.at_s : 0); });
byId("end").addEventListener("click", () => { put(byId("play"), "Replay"); follow(); });

// ── curves
const SVG = "http://www.w3.org/2000/svg";
function charts(s) {
  byId("charts-section").hidden = s.curve.length < 2;
  if (s.curve.length < 2) return;
  const losses = s.curve.filter(point => point[1] !== null);
  byId("loss-chart").hidden = losses.length < 2;
  if (losses.length > 1) chart(byId("loss-chart"), losses.map(p => [p[0], p[1]]), false, "tone-first");
  chart(byId("rate-chart"), s.curve.map(p => [p[0], p[2]]), true, "tone-good");
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(n => n * size >= raw) * size, values = [];
  for (let n = Math.ceil(low / step) * step; n <= high + step * 1e-6; n += step) values.push(Math.abs(n) < step / 1e6 ? 0 : n);
  return [values, Math.max(0, -Math.floor(Math.log10(step)))];
}
function chart(place, points, zero, stroke) {
  const svg = place.querySelector("svg"), width = Math.max(svg.clientWidth, 200), height = 190;
  const left = 52, right = 10, top = 10, bottom = 24;
  const firstStep = points[0][0], lastStep = points[points.length - 1][0];
  const values = points.map(p => p[1]);
  let low = Math.min(...values), high = Math.max(...values);
  if (zero) low = 0;
  if (high - low < 1e-12) { high += Math.abs(high) * .1 || 1; if (!zero) low -= Math.abs(low) * .1 || 1; }
  const x = n => left + (width - left - right) * (n - firstStep) / Math.max(1, lastStep - firstStep);
  const y = n => top + (height - top - bottom) * (high - n) / (high - low);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.textContent = "";
  const draw = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    svg.append(element);
  };
  const [ys, places] = ticks(low, high, 4);
  for (const n of ys) {
    draw("line", {class: "gridline", x1: left, x2: width - right, y1: y(n), y2: y(n)});
    draw("text", {x: left - 6, y: y(n) + 4, "text-anchor": "end"}, n.toFixed(Math.min(places, 4)));
  }
  for (const n of ticks(firstStep, lastStep, Math.max(2, Math.floor(width / 110)))[0])
    if (Number.isInteger(n)) draw("text", {x: x(n), y: height - 6, "text-anchor": x(n) > width - 30 ? "end" : "middle"}, String(n));
  draw("polyline", {class: "line", stroke: color(stroke), points: points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ")});
  const end = points[points.length - 1];
  draw("circle", {cx: x(end[0]), cy: y(end[1]), r: 3, fill: color(stroke)});
}
addEventListener("resize", () => { lastChart = 0; if (state) charts(state); });

const wanted = document.documentElement.dataset.speed;
if (wanted) {
  if (![...byId("speed").options].some(option => option.value === wanted)) {
    const option = make("option", byId("speed"));
    option.value = wanted; option.textContent = wanted + " ×";
  }
  byId("speed").value = wanted;
  play(0);
} else follow();
