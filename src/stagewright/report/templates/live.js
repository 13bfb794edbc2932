"use strict";
const COLUMNS = 100, COLUMN = 3, SAMPLE_MS = 100, STRIP_MS = 500, CHART_MS = 1000;
const ENDED = ["done", "failed", "refused", "interrupted", "killed"];
const STATUS = {waiting: "waiting for the run", starting: "starting", running: "running", done: "finished", failed: "broken",
  refused: "refused", interrupted: "interrupted", killed: "killed"};
const CONDITION = {absent: "not here yet", elsewhere: "can't be seen from here", stopped: "stopped", gone: "its process is gone", ended: "ended",
  broken: "failed", lost: "lost its connection"};
const KINDS = [["forward", "forward"], ["backward", "backward"], ["wait", "waiting"], ["collective", "collective"],
  ["optimizer", "optimiser"], ["prepare", "anything else"]];
const at = id => document.getElementById(id);
let state = null, source = null, replaying = false, lastChart = 0, lastShown = 0, planned = 0, boxes = [], drawn = false;

// ── numbers, as people read them
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
function figure(id, number, unit) {  // a number with its unit beside it
  const element = at(id), text = number + "\u0000" + (unit || "");
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

// ── colours: a stage keeps its own; resolved once, and again when light turns dark
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

// ── what comes from the server
function follow() {
  open("/events");
  replaying = false;
}
function play(from) {
  const chosen = at("speed").value;
  replaying = true;
  open(`/events?at=${from}&speed=${chosen === "auto" ? "auto" : Number(chosen)}`);
  put(at("play"), "Pause");
}
function open(address) {
  if (source) source.close();
  const own = source = new EventSource(address);
  own.addEventListener("state", event => { if (source === own) take(JSON.parse(event.data), true); });
  own.addEventListener("change", event => { if (source === own) take(applied(state, JSON.parse(event.data)), false); });
  own.onopen = () => { at("offline").hidden = true; };
  own.onerror = () => { if (source === own && !(replaying && finished())) at("offline").hidden = false; };
}
function applied(before, change) {  // as report/live/difference.py does
  const after = {...before, ...change};
  if (change.workers && !Array.isArray(change.workers))
    after.workers = before.workers.map((one, rank) => ({...one, ...change.workers[rank]}));
  if (change.curve && !Array.isArray(change.curve)) after.curve = [...before.curve, ...change.curve.add];
  return after;
}
const finished = () => state && state.replay && state.replay.at_s >= state.replay.length_s;
function shape(one) { return one ? [one.name, one.workers.map(w => [w.stages, w.device, w.data])] : null; }
function take(next, whole) {
  const rebuild = JSON.stringify(shape(state)) !== JSON.stringify(shape(next));
  state = next;
  if (rebuild) build();
  if (whole) lastChart = 0;
  // Ten pictures a second are enough for the eye, five where there is much to draw.
  const pause = next.workers.length > 4 ? 200 : 100;
  if (!planned) planned = setTimeout(render, whole ? 0 : Math.max(0, lastShown + pause - performance.now()));
  if (replaying && finished()) { source.close(); put(at("play"), "Replay"); }
}

// ── the boxes
function build() {
  const place = at("workers"), legend = at("legend");
  place.textContent = legend.textContent = "";
  boxes = [];
  drawn = false;
  if (!state) return;
  const stages = state.workers.some(one => one.pipeline > 0), rows = new Map();
  for (const [kind, name] of KINDS) {
    const item = make("li", legend), chip = make("i", item);
    chip.style.background = kind === "wait" ? `linear-gradient(transparent 65%, ${color("muted")} 65%)` : paint(kind, 0);
    if (kind === "prepare" || kind === "wait") chip.style.borderColor = color("grid");
    item.append(name);
  }
  for (const one of state.workers) {
    const key = stages ? `${one.data}/${one.tensor}` : "all";
    if (!rows.has(key)) {
      if (stages && state.workers.some(other => other.data || other.tensor))
        make("p", place, "name").textContent = `replica ${one.data}` + (state.workers.some(o => o.tensor) ? `, tensor share ${one.tensor}` : "");
      const row = make("ul", place, "row" + (stages ? " pipeline" : ""));
      const beside = state.workers.filter(other => !stages || (other.data === one.data && other.tensor === one.tensor)).length;
      row.dataset[beside <= 5 ? "few" : "many"] = "";
      rows.set(key, row);
    }
    const box = make("li", rows.get(key), "box"), bar = make("div", box, "bar");
    for (const stage of one.stages.length ? one.stages : [0]) make("span", bar).style.background = color(`stage-${stage % 16}`);
    const title = make("div", box), who = make("div", box, "who"), doing = make("div", box, "doing");
    const words = document.createTextNode(""), more = document.createElement("small");
    doing.append(words, more);
    make("b", title).textContent = stages ? (one.stages.length > 1 ? "Stages " : "Stage ") + one.stages.join(", ") : `Worker ${one.rank}`;
    const named = stages ? [`worker ${one.rank}`] : state.workers.some(o => o.tensor) ? [`replica ${one.data}, tensor share ${one.tensor}`]
      : state.workers.length > 1 ? [`replica ${one.data}`] : [];
    who.textContent = [...named, one.device].filter(Boolean).join(" · ");
    const canvas = make("canvas", box), facts = make("div", box, "facts");
    canvas.width = COLUMNS * COLUMN; canvas.height = 12;
    canvas.setAttribute("aria-hidden", "true");
    box.dataset.rank = one.rank;
    boxes.push({box, words, more, canvas, samples: [], pen: canvas.getContext("2d"), waits: make("span", facts), holds: make("span", facts)});
  }
}
function showWorker(own, one) {
  const working = one.condition === "working";
  own.box.dataset.condition = one.condition;
  own.box.dataset.kind = one.kind;
  const idle = one.kind === "idle" && !one.action ? "nothing" : one.action || "nothing";
  put(own.words, working ? idle : CONDITION[one.condition]);
  const more = [];
  if (one.microbatch !== null && one.condition !== "ended") more.push(`micro-batch ${one.microbatch}`);
  if (one.step !== null && !working && one.condition !== "ended") more.push(`step ${one.step}`);
  if (!working && one.condition !== "ended" && one.action) more.unshift(`at: ${one.action}`);
  if (one.still_s !== null) more.push(`for ${seconds(one.still_s)}`);
  put(own.more, more.join(", "));
  put(own.waits, one.waited === null ? "" : `waits ${percent(one.waited)}`);
  put(own.holds, one.memory_bytes === null ? "" : bytes(one.memory_bytes));
}
const moving = () => state && !document.hidden && !(replaying ? finished() : ENDED.includes(state.status));
setInterval(() => {  // the strip moves on, whether or not there is news
  if (moving()) state.workers.forEach((one, index) => boxes[index].samples.push([one.kind, one.stage ?? one.stages[0] ?? 0]));
}, SAMPLE_MS);
setInterval(() => {
  for (const own of boxes) {
    const width = own.canvas.width, height = own.canvas.height, news = own.samples.splice(0).slice(-COLUMNS);
    if (!news.length) continue;
    drawn = true;
    own.pen.globalCompositeOperation = "copy";
    own.pen.drawImage(own.canvas, -COLUMN * news.length, 0);
    own.pen.globalCompositeOperation = "source-over";
    news.forEach(([kind, stage], index) => {
      const fill = paint(kind, stage), thick = kind === "wait" ? 2 : height;  // waiting is told by its shape too
      if (!fill) return;
      own.pen.fillStyle = fill;
      own.pen.fillRect(width - COLUMN * (news.length - index), height - thick, COLUMN, thick);
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
  put(at("name"), s.name);
  document.title = `${STATUS[s.status]} · ${s.name}`;
  at("status").dataset.status = s.status;
  put(at("status"), s.replay ? (finished() ? STATUS[s.status] : "replay") : STATUS[s.status]);
  const parts = [s.model, s.task && `on ${s.task}`, s.mesh, s.schedule, s.batch && `batch ${s.batch}`
    + (s.microbatches > 1 ? ` in ${s.microbatches} micro-batches` : ""), s.training === false && "inference"];
  put(at("about"), s.model ? parts.filter(Boolean).join(" · ") : "There is no plan here yet; the page begins with the run.");
  at("error").hidden = !s.error;
  if (s.error) {
    put(at("error-text"), s.error.text);
    put(at("error-at"), s.error.at ? `at: ${s.error.at}` : "");
    at("error-more").hidden = !s.error.traceback;
    put(at("error-trace"), s.error.traceback || "");
  }
  put(at("step-name"), s.epoch && s.epochs ? `step, epoch ${s.epoch} of ${s.epochs}` : "step");
  figure("step", s.step === null ? "–" : String(s.step), s.total !== null ? `of ${s.total}` : "");
  at("progress").hidden = s.total === null;
  at("progress").value = s.total ? (s.step || 0) / s.total : 0;
  at("loss-tile").hidden = s.training === false;
  figure("loss", s.diverged ? "not a number" : s.loss === null ? "–" : s.loss.toPrecision(4));
  at("loss").classList.toggle("bad", s.diverged);
  at("metric-tile").hidden = s.metric === null;
  put(at("metric-name"), s.metric || "");
  figure("metric", s.metric_value === null ? "–" : s.metric_value.toFixed(4));
  if (s.samples_per_s === null) figure("rate", "–"); else figure("rate", digits(s.samples_per_s), "samples/s");
  at("bubble-tile").hidden = !s.schedule;
  figure("bubble", s.bubble === null ? "–" : percent(s.bubble));
  put(at("memory-name"), s.workers.some((one) => (one.device || "").startsWith("cuda")) ? "GPU memory" : "process memory");
  if (s.memory_bytes === null) figure("memory", "–");
  else figure("memory", bytes(s.memory_bytes), s.memory_limit_bytes ? `of ${bytes(s.memory_limit_bytes)}` : "");
  put(at("left-name"), ended ? "took" : "remaining");
  if (ended) figure("left", s.elapsed_s === null ? "–" : seconds(s.elapsed_s));
  else figure("left", s.remaining_s === null ? "–" : seconds(s.remaining_s));
  put(at("elapsed"), ended || s.elapsed_s === null ? "" : `after ${seconds(s.elapsed_s)}`);
  at("workers-section").hidden = !s.workers.length;
  at("workers-section").classList.toggle("still", ended && !drawn);
  put(at("workers-title"), replaying ? "What every worker did, with the last 10 s of the replay"
    : ended ? "The workers" : "What every worker does now, and did in the last 10 s");
  s.workers.forEach((one, index) => { if (boxes[index]) showWorker(boxes[index], one); });
  player(s, ended);
  const now = performance.now();
  if (now - lastChart >= CHART_MS || ended) { lastChart = now; charts(s); }
  put(at("foot"), s.begun ? `Begun ${new Date(s.begun).toLocaleString()}. This page only reads the run folder.` : "This page only reads the run folder.");
}
function player(s, ended) {
  at("player").hidden = !(ended || replaying) || !s.workers.length || s.status === "killed";
  at("end").hidden = !replaying;
  if (!s.replay) { put(at("position"), ""); at("seek").value = 1; return; }
  at("seek").max = Math.max(s.replay.length_s, 1e-3);
  if (document.activeElement !== at("seek") || !at("seek").matches(":active")) at("seek").value = s.replay.at_s;
  put(at("position"), `${seconds(s.replay.at_s)} of ${seconds(s.replay.length_s)}`);
}
at("play").addEventListener("click", () => {
  if (at("play").textContent === "Pause") { source.close(); put(at("play"), "Go on"); return; }
  const from = state && state.replay && !finished() ? state.replay.at_s : 0;
  if (from === 0) boxes.forEach(own => own.pen.clearRect(0, 0, own.canvas.width, own.canvas.height));
  play(from);
});
at("seek").addEventListener("change", () => play(state && state.replay ? Number(at("seek").value) : 0));
at("speed").addEventListener("change", () => { if (at("play").textContent === "Pause") play(state.replay ? state.replay.at_s : 0); });
at("end").addEventListener("click", () => { put(at("play"), "Replay"); follow(); });

// ── the curves
const SVG = "http://www.w3.org/2000/svg";
function charts(s) {
  at("charts-section").hidden = s.curve.length < 2;
  if (s.curve.length < 2) return;
  const losses = s.curve.filter(point => point[1] !== null);
  at("loss-chart").hidden = losses.length < 2;
  if (losses.length > 1) chart(at("loss-chart"), losses.map(p => [p[0], p[1]]), false, "tone-first");
  chart(at("rate-chart"), s.curve.map(p => [p[0], p[2]]), true, "tone-good");
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(n => n * size >= raw) * size, found = [];
  for (let n = Math.ceil(low / step) * step; n <= high + step * 1e-6; n += step) found.push(Math.abs(n) < step / 1e6 ? 0 : n);
  return [found, Math.max(0, -Math.floor(Math.log10(step)))];
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
  if (![...at("speed").options].some(option => option.value === wanted)) {
    const option = make("option", at("speed"));
    option.value = wanted; option.textContent = wanted + " ×";
  }
  at("speed").value = wanted;
  play(0);
} else follow();
