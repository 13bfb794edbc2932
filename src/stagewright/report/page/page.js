// What moves on the page: light and dark, and timelines that zoom. No library, no request.
"use strict";
(() => {
  // Light, dark, or as the system has it.
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = 0;
  button.addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    document.documentElement.dataset.theme = themes[theme];
    button.textContent = `Colours: ${themes[theme]}`;
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());

  // Buttons that copy.
  for (const one of document.querySelectorAll("button.copy")) {
    one.addEventListener("click", async () => {
      const text = one.parentElement.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        one.textContent = "copied";
      } catch {
        one.textContent = "select and copy";
      }
      setTimeout(() => (one.textContent = "copy"), 1500);
    });
  }

  // A colour by its name, as it is now. Names of stages come from numbers, so they are kept.
  const probe = document.getElementById("probe");
  let colors = new Map();
  function paint(name) {
    if (!colors.has(name)) {
      probe.style.color = `var(--${name})`;
      colors.set(name, getComputedStyle(probe).color);
    }
    return colors.get(name);
  }

  const tip = document.getElementById("tip");
  const LABEL = 18, COMPUTE = 26, THIN = 7, GAP = 10, AXIS = 22;
  const timelines = [...document.querySelectorAll(".timeline")].map(prepare);
  let together = timelines.length > 1;

  function time(seconds) {
    const size = Math.abs(seconds);
    const [unit, factor] = size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
    return `${Number((seconds * factor).toPrecision(4))} ${unit}`;
  }

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (count >= 1024 && at < 4) { count /= 1024; at++; }
    return `${Number(count.toPrecision(3))} ${units[at]}`;
  }

  // Columns as arrays; `reach` is the latest end so far, so that what is seen is found by halving.
  function lane(data) {
    const count = data.begin.length;
    const begin = new Float64Array(count), end = new Float64Array(count), reach = new Float64Array(count);
    let now = 0, latest = -Infinity;
    for (let at = 0; at < count; at++) {
      now += data.begin[at];
      begin[at] = now;
      end[at] = now + data.length[at];
      latest = Math.max(latest, end[at]);
      reach[at] = latest;
    }
    const column = (values) => Array.isArray(values) ? (at) => values[at] : () => values;
    const columns = {};
    for (const name of ["kind", "stage", "microbatch", "bytes", "peer", "note"]) columns[name] = column(data[name]);
    return { stream: data.stream, count, begin, end, reach, ...columns };
  }

  function prepare(element) {
    const data = JSON.parse(element.querySelector("script").textContent);
    const canvas = element.querySelector("canvas");
    const rows = [];
    let top = 0;
    for (const worker of data.workers) {
      const row = { worker, top, lanes: [] };
      top += LABEL;
      for (const one of worker.lanes.map(lane)) {
        const height = one.stream === "compute" ? COMPUTE : THIN;
        row.lanes.push({ ...one, top, height });
        top += height + 2;
      }
      top += GAP;
      rows.push(row);
    }
    const steps = data.steps;
    const chart = {
      element, canvas, data, rows, height: top + AXIS, steps,
      first: steps[0][1], last: Math.max(...steps.map((step) => step[2])), from: 0, to: 1, drawn: 0,
    };
    const median = steps.find((step) => step[0] === data.median) || steps[0];
    chart.home = median[1];
    chart.length = median[2] - median[1];
    canvas.style.height = `${chart.height}px`;
    listen(chart);
    return chart;
  }

  // Where the view is; with several runs they move together, each from the begin of its own step.
  function look(chart, from, to) {
    const least = 20;
    if (to - from < least) { const middle = (from + to) / 2; from = middle - least / 2; to = middle + least / 2; }
    const shift = from - chart.home, span = to - from;
    for (const one of together ? timelines : [chart]) {
      one.from = one.home + shift;
      one.to = one.from + span;
      const room = Math.max(one.last - one.first, span) * 0.5;
      if (one === chart) {
        if (one.from < one.first - room) { one.from = one.first - room; one.to = one.from + span; }
        if (one.to > one.last + room) { one.to = one.last + room; one.from = one.to - span; }
      }
      one.element.dataset.from = one.from;
      one.element.dataset.to = one.to;
      ask(one);
    }
  }

  function zoom(chart, factor, at) {
    const middle = at === undefined ? (chart.from + chart.to) / 2 : at;
    const widest = 2 * (chart.last - chart.first);
    const span = Math.min((chart.to - chart.from) * factor, widest);
    const share = (middle - chart.from) / (chart.to - chart.from);
    look(chart, middle - share * span, middle + (1 - share) * span);
  }

  function showStep(chart) {
    const length = together ? Math.max(...timelines.map((one) => one.length)) : chart.length;
    look(chart, chart.home, chart.home + length);
  }

  function ask(chart) {
    if (!chart.waiting) {
      chart.waiting = requestAnimationFrame(() => { chart.waiting = 0; draw(chart); });
    }
  }

  function drawAll() {
    colors = new Map();
    for (const one of timelines) ask(one);
  }

  function firstSeen(one, from) {
    let low = 0, high = one.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (one.reach[middle] > from) high = middle; else low = middle + 1;
    }
    return low;
  }

  function face(kind, stage) {
    const pale = kind.startsWith("backward");
    if (kind === "optimizer") return paint("muted");
    if (kind === "recompute") return paint("share-bubble");
    if (kind === "receive") return paint("grid");
    if (kind === "encode" || kind === "decode") return paint("tone-good");
    if (kind === "collective") return paint("share-collective");
    return paint(stage < 0 ? "muted" : `stage-${stage % 16}${pale ? "-pale" : ""}`);
  }

  function draw(chart) {
    const { canvas, data } = chart;
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return; // folded
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(chart.height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(chart.height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, chart.height);
    const scale = width / (chart.to - chart.from);
    const across = (moment) => (moment - chart.from) * scale;
    const bottom = chart.height - AXIS;
    ticks(chart, context, width, bottom, across);
    context.font = "12px system-ui, sans-serif";
    let rectangles = 0;
    for (const row of chart.rows) {
      context.fillStyle = paint("ink");
      context.textAlign = "left";
      context.fillText(row.worker.label, 0, row.top + 13);
      for (const one of row.lanes) rectangles += drawLane(one, context, width, chart, across, data.kinds);
    }
    chart.element.dataset.rectangles = rectangles;
    chart.drawn++;
  }

  // What is narrower than a pixel is drawn once a pixel: the work is bound by what is seen, not by the run.
  function drawLane(one, context, width, chart, across, kinds) {
    context.fillStyle = paint("card");
    context.fillRect(0, one.top, width, one.height);
    let rectangles = 0, lastPixel = -1;
    context.textAlign = "center";
    for (let at = firstSeen(one, chart.from); at < one.count && one.begin[at] < chart.to; at++) {
      if (one.end[at] < chart.from) continue;
      const left = Math.max(-2, across(one.begin[at])), right = Math.min(width + 2, across(one.end[at]));
      const size = right - left;
      if (size < 1) {
        const pixel = left | 0;
        if (pixel === lastPixel) continue;
        lastPixel = pixel;
      }
      const kind = kinds[one.kind(at)], stage = one.stage(at);
      const inner = one.stream === "compute" && (kind === "collective" || kind === "recompute" || kind.endsWith("code"));
      const top = inner ? one.top + one.height * 0.55 : one.top;
      const height = inner ? one.height * 0.45 : one.height;
      context.fillStyle = face(kind, stage);
      context.fillRect(left, top, Math.max(size - (size > 3 ? 0.6 : 0), 0.7), height);
      rectangles++;
      const chunk = one.microbatch(at);
      if (one.stream === "compute" && !inner && size > 16 && chunk >= 0) {
        context.fillStyle = paint(kind === "forward" ? "paper" : "ink");
        context.fillText(chunk, (left + right) / 2, one.top + 13);
      }
    }
    return rectangles;
  }

  function ticks(chart, context, width, bottom, across) {
    const unit = chart.data.unit_s, span = (chart.to - chart.from) * unit;
    const rough = span / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
    const home = chart.home * unit;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.strokeStyle = paint("grid");
    context.fillStyle = paint("muted");
    context.lineWidth = 1;
    for (let at = Math.ceil((chart.from * unit - home) / step); ; at++) {
      const place = across((home + at * step) / unit);
      if (place > width) break;
      context.beginPath();
      context.moveTo(place, 0);
      context.lineTo(place, bottom);
      context.stroke();
      context.fillText(time(at * step), Math.min(Math.max(place, 22), width - 22), bottom + 15);
    }
    context.strokeStyle = paint("muted");
    context.setLineDash([4, 3]);
    for (const step of chart.steps) {
      const place = across(step[1]);
      if (place < 0 || place > width) continue;
      context.beginPath();
      context.moveTo(place, 0);
      context.lineTo(place, bottom);
      context.stroke();
    }
    context.setLineDash([]);
  }

  function under(chart, x, y) {
    const moment = chart.from + (x / chart.canvas.clientWidth) * (chart.to - chart.from);
    const slack = (2 / chart.canvas.clientWidth) * (chart.to - chart.from);
    for (const row of chart.rows) for (const one of row.lanes) {
      if (y < one.top || y > one.top + one.height) continue;
      let found = -1;
      for (let at = firstSeen(one, moment - slack); at < one.count && one.begin[at] <= moment + slack; at++) {
        if (one.end[at] >= moment - slack) found = at;
      }
      if (found >= 0) return { row, one, at: found };
    }
    return null;
  }

  function describe(chart, { row, one, at }) {
    const { data } = chart, unit = data.unit_s, lines = [];
    const chunk = one.microbatch(at), stage = one.stage(at), peer = one.peer(at), note = one.note(at);
    lines.push(`${data.kinds[one.kind(at)]}${chunk >= 0 ? `, micro-batch ${chunk}` : ""}${stage >= 0 ? `, stage ${stage}` : ""}`);
    lines.push(`${row.worker.label}: ${time((one.end[at] - one.begin[at]) * unit)} from ${time((one.begin[at] - chart.home) * unit)}`);
    if (one.bytes(at) >= 0) lines.push(`${bytes(one.bytes(at))}${peer >= 0 ? `, worker ${peer}` : ""}`);
    if (note >= 0) lines.push(data.notes[note]);
    if (row.worker.error_s > 0) lines.push(`clock ± ${time(row.worker.error_s)}`);
    return lines.join("\n");
  }

  function listen(chart) {
    const { canvas, element } = chart;
    const touches = new Map();
    let moved = 0;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top, box.width];
    };
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      const [x, , width] = place(event);
      zoom(chart, Math.exp(event.deltaY * 0.002), chart.from + (x / width) * (chart.to - chart.from));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      touches.set(event.pointerId, place(event)[0]);
      moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y, width] = place(event);
      if (touches.has(event.pointerId)) {
        const before = [...touches.values()];
        const change = x - touches.get(event.pointerId);
        touches.set(event.pointerId, x);
        moved += Math.abs(change);
        const unit = (chart.to - chart.from) / width;
        if (touches.size === 2) {
          const now = [...touches.values()];
          const middle = chart.from + ((now[0] + now[1]) / 2) * unit;
          zoom(chart, Math.max(8, Math.abs(before[0] - before[1])) / Math.max(8, Math.abs(now[0] - now[1])), middle);
        } else {
          look(chart, chart.from - change * unit, chart.to - change * unit);
        }
        tip.hidden = true;
        return;
      }
      const found = under(chart, x, y);
      tip.hidden = !found;
      if (found) {
        tip.textContent = describe(chart, found);
        const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
        tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, room))}px`;
        tip.style.top = `${event.clientY + 16}px`;
      }
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, (event) => touches.delete(event.pointerId));
    }
    canvas.addEventListener("pointerleave", () => (tip.hidden = true));
    canvas.addEventListener("dblclick", (event) => {
      const [x, , width] = place(event);
      zoom(chart, 0.4, chart.from + (x / width) * (chart.to - chart.from));
    });
    canvas.addEventListener("keydown", (event) => {
      const span = chart.to - chart.from;
      const keys = {
        ArrowLeft: () => look(chart, chart.from - span / 8, chart.to - span / 8),
        ArrowRight: () => look(chart, chart.from + span / 8, chart.to + span / 8),
        "+": () => zoom(chart, 0.6), "-": () => zoom(chart, 1 / 0.6), 0: () => showStep(chart),
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    const act = {
      closer: () => zoom(chart, 0.5), wider: () => zoom(chart, 2), step: () => showStep(chart),
      all: () => { for (const one of together ? timelines : [chart]) { one.from = one.first; one.to = one.last; ask(one); mark(one); } },
      before: () => jump(chart, -1), after: () => jump(chart, 1),
    };
    for (const one of element.querySelectorAll("button[data-act]")) {
      one.addEventListener("click", () => act[one.dataset.act]());
    }
  }

  function mark(one) {
    one.element.dataset.from = one.from;
    one.element.dataset.to = one.to;
  }

  // To the step before or after: of every run that moves along, its own.
  function jump(chart, by) {
    for (const one of together ? timelines : [chart]) {
      const now = one.steps.findIndex((step) => step[1] === one.home);
      const next = one.steps[Math.min(Math.max(now + by, 0), one.steps.length - 1)];
      const shift = next[1] - one.home;
      one.home = next[1];
      one.from += shift;
      one.to += shift;
      mark(one);
      ask(one);
    }
  }

  const lock = document.getElementById("together");
  if (lock) lock.addEventListener("change", () => (together = lock.checked));
  for (const chart of timelines) showStep(chart);
  addEventListener("resize", drawAll);
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", drawAll);
})();
