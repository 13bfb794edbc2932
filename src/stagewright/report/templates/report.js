// Interaction of the report page: light and dark mode, copying, zoomable timelines. No library, no request.
"use strict";
(() => {
  // Light mode, dark mode, or the system's choice.
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = 0;
  button.addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    document.documentElement.dataset.theme = themes[theme];
    button.textContent = `Theme: ${themes[theme]}`;
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());

  // Copy buttons.
  for (const copy of document.querySelectorAll("button.copy")) {
    copy.addEventListener("click", async () => {
      const text = copy.parentElement.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        copy.textContent = "copied";
      } catch {
        copy.textContent = "select and copy";
      }
      setTimeout(() => (copy.textContent = "copy"), 1500);
    });
  }

  // The current value of a color name, cached.
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
  let linked = timelines.length > 1;

  function time(seconds) {
    const size = Math.abs(seconds);
    const [unit, factor] = size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
    return `${Number((seconds * factor).toPrecision(4))} ${unit}`;
  }

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let index = 0;
    while (count >= 1024 && index < 4) { count /= 1024; index++; }
    return `${Number(count.toPrecision(3))} ${units[index]}`;
  }

  // Columns as arrays; `reach` is the latest end so far, so that binary search finds the visible events.
  function lane(data) {
    const count = data.begin.length;
    const begin = new Float64Array(count), end = new Float64Array(count), reach = new Float64Array(count);
    let now = 0, latest = -Infinity;
    for (let index = 0; index < count; index++) {
      now += data.begin[index];
      begin[index] = now;
      end[index] = now + data.length[index];
      latest = Math.max(latest, end[index]);
      reach[index] = latest;
    }
    const column = (values) => Array.isArray(values) ? (index) => values[index] : () => values;
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
      for (const columns of worker.lanes.map(lane)) {
        const height = columns.stream === "compute" ? COMPUTE : THIN;
        row.lanes.push({ ...columns, top, height });
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

  // Set the visible range; linked timelines follow, each relative to the start of its own step.
  function setView(chart, from, to) {
    const least = 20;
    if (to - from < least) { const middle = (from + to) / 2; from = middle - least / 2; to = middle + least / 2; }
    const shift = from - chart.home, span = to - from;
    for (const target of linked ? timelines : [chart]) {
      target.from = target.home + shift;
      target.to = target.from + span;
      const room = Math.max(target.last - target.first, span) * 0.5;
      if (target === chart) {
        if (target.from < target.first - room) { target.from = target.first - room; target.to = target.from + span; }
        if (target.to > target.last + room) { target.to = target.last + room; target.from = target.to - span; }
      }
      storeView(target);
      requestDraw(target);
    }
  }

  function zoom(chart, factor, center) {
    const middle = center === undefined ? (chart.from + chart.to) / 2 : center;
    const widest = 2 * (chart.last - chart.first);
    const span = Math.min((chart.to - chart.from) * factor, widest);
    const share = (middle - chart.from) / (chart.to - chart.from);
    setView(chart, middle - share * span, middle + (1 - share) * span);
  }

  function showStep(chart) {
    const length = linked ? Math.max(...timelines.map((timeline) => timeline.length)) : chart.length;
    setView(chart, chart.home, chart.home + length);
  }

  function requestDraw(chart) {
    if (!chart.waiting) {
      chart.waiting = requestAnimationFrame(() => { chart.waiting = 0; draw(chart); });
    }
  }

  function drawAll() {
    colors = new Map();
    for (const chart of timelines) requestDraw(chart);
  }

  function firstVisible(lane, from) {
    let low = 0, high = lane.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.reach[middle] > from) high = middle; else low = middle + 1;
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
    if (!width) return; // inside a closed fold
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
      for (const lane of row.lanes) rectangles += drawLane(lane, context, width, chart, across, data.kinds);
    }
    chart.element.dataset.rectangles = rectangles;
    chart.drawn++;
  }

  // Events narrower than a pixel are drawn once per pixel: the work depends on the width, not on the run.
  function drawLane(lane, context, width, chart, across, kinds) {
    context.fillStyle = paint("card");
    context.fillRect(0, lane.top, width, lane.height);
    let rectangles = 0, lastPixel = -1;
    context.textAlign = "center";
    for (let index = firstVisible(lane, chart.from); index < lane.count && lane.begin[index] < chart.to; index++) {
      if (lane.end[index] < chart.from) continue;
      const left = Math.max(-2, across(lane.begin[index])), right = Math.min(width + 2, across(lane.end[index]));
      const size = right - left;
      if (size < 1) {
        const pixel = left | 0;
        if (pixel === lastPixel) continue;
        lastPixel = pixel;
      }
      const kind = kinds[lane.kind(index)], stage = lane.stage(index);
      const inner = lane.stream === "compute" && (kind === "collective" || kind === "recompute" || kind.endsWith("code"));
      const top = inner ? lane.top + lane.height * 0.55 : lane.top;
      const height = inner ? lane.height * 0.45 : lane.height;
      context.fillStyle = face(kind, stage);
      context.fillRect(left, top, Math.max(size - (size > 3 ? 0.6 : 0), 0.7), height);
      rectangles++;
      const chunk = lane.microbatch(index);
      if (lane.stream === "compute" && !inner && size > 16 && chunk >= 0) {
        context.fillStyle = paint(kind === "forward" ? "paper" : "ink");
        context.fillText(chunk, (left + right) / 2, lane.top + 13);
      }
    }
    return rectangles;
  }

  function ticks(chart, context, width, bottom, across) {
    const unit = chart.data.unit_s, span = (chart.to - chart.from) * unit;
    const rough = span / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const home = chart.home * unit;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.strokeStyle = paint("grid");
    context.fillStyle = paint("muted");
    context.lineWidth = 1;
    for (let index = Math.ceil((chart.from * unit - home) / step); ; index++) {
      const x = across((home + index * step) / unit);
      if (x > width) break;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, bottom);
      context.stroke();
      context.fillText(time(index * step), Math.min(Math.max(x, 22), width - 22), bottom + 15);
    }
    context.strokeStyle = paint("muted");
    context.setLineDash([4, 3]);
    for (const step of chart.steps) {
      const x = across(step[1]);
      if (x < 0 || x > width) continue;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, bottom);
      context.stroke();
    }
    context.setLineDash([]);
  }

  function under(chart, x, y) {
    const moment = chart.from + (x / chart.canvas.clientWidth) * (chart.to - chart.from);
    const slack = (2 / chart.canvas.clientWidth) * (chart.to - chart.from);
    for (const row of chart.rows) for (const lane of row.lanes) {
      if (y < lane.top || y > lane.top + lane.height) continue;
      let hit = -1;
      for (let index = firstVisible(lane, moment - slack); index < lane.count && lane.begin[index] <= moment + slack; index++) {
        if (lane.end[index] >= moment - slack) hit = index;
      }
      if (hit >= 0) return { row, lane, index: hit };
    }
    return null;
  }

  function describe(chart, { row, lane, index }) {
    const { data } = chart, unit = data.unit_s, lines = [];
    const chunk = lane.microbatch(index), stage = lane.stage(index), peer = lane.peer(index), note = lane.note(index);
    lines.push(`${data.kinds[lane.kind(index)]}${chunk >= 0 ? `, micro-batch ${chunk}` : ""}${stage >= 0 ? `, stage ${stage}` : ""}`);
    lines.push(`${row.worker.label}: ${time((lane.end[index] - lane.begin[index]) * unit)} from ${time((lane.begin[index] - chart.home) * unit)}`);
    if (lane.bytes(index) >= 0) lines.push(`${bytes(lane.bytes(index))}${peer >= 0 ? `, worker ${peer}` : ""}`);
    if (note >= 0) lines.push(data.notes[note]);
    if (row.worker.error_s > 0) lines.push(`clock ± ${time(row.worker.error_s)}`);
    return lines.join("\n");
  }

  function listen(chart) {
    const { canvas, element } = chart;
    const touches = new Map();
    let moved = 0;
    const position = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top, box.width];
    };
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      const [x, , width] = position(event);
      zoom(chart, Math.exp(event.deltaY * 0.002), chart.from + (x / width) * (chart.to - chart.from));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      touches.set(event.pointerId, position(event)[0]);
      moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y, width] = position(event);
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
          setView(chart, chart.from - change * unit, chart.to - change * unit);
        }
        tip.hidden = true;
        return;
      }
      const hit = under(chart, x, y);
      tip.hidden = !hit;
      if (hit) {
        tip.textContent = describe(chart, hit);
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
      const [x, , width] = position(event);
      zoom(chart, 0.4, chart.from + (x / width) * (chart.to - chart.from));
    });
    canvas.addEventListener("keydown", (event) => {
      const span = chart.to - chart.from;
      const keys = {
        ArrowLeft: () => setView(chart, chart.from - span / 8, chart.to - span / 8),
        ArrowRight: () => setView(chart, chart.from + span / 8, chart.to + span / 8),
        "+": () => zoom(chart, 0.6), "-": () => zoom(chart, 1 / 0.6), 0: () => showStep(chart),
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    const act = {
      closer: () => zoom(chart, 0.5), wider: () => zoom(chart, 2), step: () => showStep(chart),
      all: () => { for (const target of linked ? timelines : [chart]) { target.from = target.first; target.to = target.last; requestDraw(target); storeView(target); } },
      before: () => jump(chart, -1), after: () => jump(chart, 1),
    };
    for (const tool of element.querySelectorAll("button[data-act]")) {
      tool.addEventListener("click", () => act[tool.dataset.act]());
    }
  }

  function storeView(chart) {
    chart.element.dataset.from = chart.from;
    chart.element.dataset.to = chart.to;
  }

  // Go to the previous or next step; linked timelines follow.
  function jump(chart, by) {
    for (const target of linked ? timelines : [chart]) {
      const now = target.steps.findIndex((step) => step[1] === target.home);
      const next = target.steps[Math.min(Math.max(now + by, 0), target.steps.length - 1)];
      const shift = next[1] - target.home;
      target.home = next[1];
      target.from += shift;
      target.to += shift;
      storeView(target);
      requestDraw(target);
    }
  }

  const lock = document.getElementById("together");
  if (lock) lock.addEventListener("change", () => (linked = lock.checked));
  for (const chart of timelines) showStep(chart);
  addEventListener("resize", drawAll);
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", drawAll);
})();
