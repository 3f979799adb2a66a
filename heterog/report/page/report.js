"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const decode = (type, text) => {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new type(bytes.buffer);
  };
  const start = decode(Float64Array, data.start), finish = decode(Float64Array, data.finish);
  const category = decode(Uint8Array, data.category), nameOf = decode(Int32Array, data.name);
  const moduleOf = decode(Int32Array, data.module), bytesOf = decode(Float64Array, data.bytes);
  const samplesOf = decode(Int32Array, data.samples), microOf = decode(Int32Array, data.micro);
  const path = decode(Int32Array, data.critical);
  const onPath = new Uint8Array(start.length);
  for (const task of path) onPath[task] = 1;

  let GUTTER = 190;
  const AXIS = 22, LANE = 20, SUBROW = 5, MEMORY_ROW = 46;
  const whole = Math.max(data.seconds, 1e-9), closest = Math.min(whole, Math.max(whole * 1e-7, 1e-8));
  const allLanes = [];
  for (const each of data.lanes) {
    const tasks = decode(Int32Array, each.tasks), rows = decode(Uint8Array, each.rows);
    let count = 1, longest = 0;
    for (let i = 0; i < tasks.length; i++) {
      count = Math.max(count, rows[i] + 1);
      longest = Math.max(longest, finish[tasks[i]] - start[tasks[i]]);
    }
    const height = Math.max(LANE, count * SUBROW + 4);
    allLanes.push({ name: each.name, link: each.link, host: each.host, busy: each.busy, tasks, rows, count, longest, top: 0, height });
  }
  let lanes = [], stack = AXIS;
  const layOut = (withLinks) => {
    lanes = allLanes.filter((lane) => withLinks || !lane.link);
    stack = AXIS;
    for (const lane of lanes) {
      lane.top = stack;
      stack += lane.height;
    }
  };
  layOut(true);
  const memory = data.memory.map((each) => ({
    ...each, times: decode(Float64Array, each.times), bytes: decode(Float64Array, each.bytes),
  }));

  // --- words -----------------------------------------------------------------------------------
  const seconds = (value, digits = 3) => {
    const size = Math.abs(value);
    if (size >= 1) return `${value.toFixed(digits)} s`;
    if (size >= 1e-3) return `${(value * 1e3).toFixed(digits)} ms`;
    return `${(value * 1e6).toFixed(Math.min(digits, 2))} µs`;
  };
  const bytes = (value) => {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
    }
    return `${value.toFixed(0)} B`;
  };
  const percent = (part) => (part > 0 && part < 0.005 ? "< 1 %" : `${(part * 100).toFixed(0)} %`);
  const facts = (task, lane) => {
    const found = [
      `module ${data.modules[moduleOf[task]] || "(root)"}`,
      `on ${lane.name}`,
      `starts at ${seconds(start[task])}, takes ${seconds(finish[task] - start[task])}`,
    ];
    const sizes = [];
    if (bytesOf[task] > 0) sizes.push(bytes(bytesOf[task]));
    if (samplesOf[task] > 0) sizes.push(`${samplesOf[task]} samples`);
    if (microOf[task] > 0) sizes.push(`micro-batch ${microOf[task] + 1}`);
    if (onPath[task]) sizes.push("on the critical path");
    if (sizes.length) found.push(sizes.join(", "));
    return found;
  };

  // --- state -----------------------------------------------------------------------------------
  const canvas = $("timeline"), tip = $("tip"), details = $("details"), second = $("memory");
  const view = { from: 0, to: whole, y: 0, width: 0, right: 0, height: 0, hover: null, lane: -1, picked: -1, at: NaN };
  let showPath = false, only = -1, found = null, colours = {}, waiting = false;
  const right = () => view.right;
  const x = (time) => GUTTER + ((time - view.from) / (view.to - view.from)) * (right() - GUTTER);
  const timeAt = (px) => view.from + ((px - GUTTER) / (right() - GUTTER)) * (view.to - view.from);
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); drawMemory(); });
  };
  const show = (from, to) => {
    const span = Math.min(Math.max(to - from, closest), whole);
    let begin = to - from === span ? from : (from + to - span) / 2;
    begin = Math.min(Math.max(begin, 0), whole - span);
    view.from = begin;
    view.to = begin + span;
    redraw();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) =>
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const pan = (part) => {
    const shift = Math.min(Math.max(part * (view.to - view.from), -view.from), whole - view.to);
    show(view.from + shift, view.to + shift);
  };
  const scroll = (by) => {
    view.y = Math.min(Math.max(view.y + by, 0), Math.max(stack - view.height, 0));
    redraw();
  };
  const stands = (task) =>
    (!showPath || onPath[task] === 1) && (only < 0 || category[task] === only) && (!found || found[nameOf[task]]);
  const filtered = () => showPath || only >= 0 || found !== null;

  // --- drawing ---------------------------------------------------------------------------------
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = Object.fromEntries(["card", "ink", "soft", "line", "grid", "band", "accent", "bad"].map((name) => [name, read(name)]));
    colours.fill = data.categories.map((_, index) => read(`c${index}`));
    colours.text = colours.fill.map((hex) => {
      const [r, g, b] = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
      return 0.299 * r + 0.587 * g + 0.114 * b > 125 ? "#111111" : "#ffffff";
    });
  };
  const prepare = (target, height) => {
    GUTTER = document.documentElement.clientWidth < 640 ? 112 : 190;
    const width = target.parentElement.clientWidth, scale = window.devicePixelRatio || 1;
    if (target.width !== Math.round(width * scale) || target.height !== Math.round(height * scale)) {
      target.style.height = `${height}px`;
      target.width = Math.round(width * scale);
      target.height = Math.round(height * scale);
    }
    const pen = target.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = "11px system-ui, 'Liberation Sans', sans-serif";
    pen.textBaseline = "middle";
    return pen;
  };
  const fitted = (pen, text, room) => {
    if (pen.measureText(text).width <= room) return text;
    let keep = Math.max(Math.floor((text.length * room) / pen.measureText(text).width) - 1, 0);
    while (keep > 0 && pen.measureText(`${text.slice(0, keep)}…`).width > room) keep--;
    return keep > 0 ? `${text.slice(0, keep)}…` : "";
  };
  const ticks = () => {
    const rough = (view.to - view.from) / Math.max((right() - GUTTER) / 90, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
    const found = [];
    for (let n = Math.ceil(view.from / step); n * step <= view.to; n++) found.push(n * step);
    return [found, step];
  };
  const firstFrom = (lane, time) => {
    let low = 0, high = lane.tasks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[lane.tasks[middle]] < time) low = middle + 1; else high = middle;
    }
    return low;
  };
  const box = (lane, index) => {
    const size = (lane.height - 4) / lane.count;
    return [lane.top - view.y + 2 + lane.rows[index] * size, size];
  };
  const drawLane = (pen, lane, standing) => {
    const perSecond = (right() - GUTTER) / (view.to - view.from), edge = right();
    const runs = Array.from({ length: lane.count }, () => ({ left: -1, end: -1, colour: -1, top: 0, size: 0 }));
    let colour = -1;
    const paint = (left, end, which, top, size) => {
      if (colour !== which) pen.fillStyle = colours.fill[(colour = which)];
      pen.fillRect(left, top, end - left, size > 3 ? size - 0.5 : size);
    };
    const flush = (run) => {
      if (run.end > run.left) paint(run.left, run.end, run.colour, run.top, run.size);
      run.left = run.end;
    };
    for (let i = firstFrom(lane, view.from - lane.longest); i < lane.tasks.length; i++) {
      const task = lane.tasks[i];
      if (start[task] > view.to) break;
      if (finish[task] < view.from || stands(task) !== standing) continue;
      let left = GUTTER + (start[task] - view.from) * perSecond;
      const width = (finish[task] - start[task]) * perSecond;
      const run = runs[lane.rows[i]];
      if (width < 1) {  // whatever else begins in this column of pixels would not be seen
        left = Math.floor(left);
        if (left < run.end) continue;
        if (left > run.end || category[task] !== run.colour) {
          flush(run);
          [run.top, run.size] = box(lane, i);
          run.left = left;
          run.colour = category[task];
        }
        run.end = left + 1;
        continue;
      }
      flush(run);
      const end = Math.min(left + width, edge);
      left = Math.max(left, GUTTER);
      const [top, size] = box(lane, i);
      paint(left, Math.max(end - (width > 4 ? 1 : 0), left + 0.5), category[task], top, size);
      if (size >= 11 && end - left > 46) {
        pen.fillStyle = colours.text[colour];
        pen.fillText(fitted(pen, data.names[nameOf[task]], end - left - 8), left + 4, top + size / 2);
        colour = -1;
      }
    }
    runs.forEach(flush);
  };
  const drawPath = (pen) => {
    const place = new Map();
    for (const lane of lanes) {
      for (let i = firstFrom(lane, view.from - lane.longest); i < lane.tasks.length && start[lane.tasks[i]] <= view.to; i++) {
        const task = lane.tasks[i];
        if (onPath[task] && !place.has(task)) place.set(task, box(lane, i));
      }
    }
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.25;
    pen.beginPath();
    let before = null, turns = 0;
    for (const task of path) {
      const at = place.get(task), middle = at ? at[0] + at[1] / 2 : null;
      if (middle !== null && before !== null && before !== middle) {
        pen.moveTo(x(start[task]), before);
        pen.lineTo(x(start[task]), middle);
        turns++;
      }
      before = middle;
    }
    pen.globalAlpha = Math.min(0.6, Math.max(0.12, 60 / turns));
    pen.stroke();
    pen.globalAlpha = 1;
  };
  const draw = () => {
    const height = Math.min(stack + 2, Math.max(260, window.innerHeight - 210));
    const pen = prepare(canvas, height);
    view.width = canvas.parentElement.clientWidth;
    // One scale for both charts; the second may have a scroll bar beside it.
    view.right = Math.min(view.width, second.parentElement.clientWidth) - 8;
    view.height = height;
    view.y = Math.min(view.y, Math.max(stack - height, 0));
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, view.width, height);
    const [marks, step] = ticks();
    const visible = lanes.filter((lane) => lane.top + lane.height - view.y > AXIS && lane.top - view.y < height);
    lanes.forEach((lane, index) => {
      if (index % 2 || view.lane === index) {
        pen.fillStyle = view.lane === index ? colours.grid : colours.band;
        pen.fillRect(0, lane.top - view.y, view.width, lane.height);
      }
      if (index && lane.host !== lanes[index - 1].host) {
        pen.fillStyle = colours.soft;
        pen.fillRect(0, lane.top - view.y - 0.5, view.width, 1);
      }
    });
    pen.strokeStyle = colours.grid;
    pen.lineWidth = 1;
    for (const mark of marks) {
      pen.beginPath();
      pen.moveTo(Math.round(x(mark)) + 0.5, AXIS);
      pen.lineTo(Math.round(x(mark)) + 0.5, height);
      pen.stroke();
    }
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, AXIS, right() - GUTTER, height - AXIS);
    pen.clip();
    if (filtered()) {
      pen.globalAlpha = 0.16;
      for (const lane of visible) drawLane(pen, lane, false);
      pen.globalAlpha = 1;
    }
    for (const lane of visible) drawLane(pen, lane, true);
    if (showPath) drawPath(pen);
    for (const [task, colour] of [[view.picked, colours.accent], [view.hover, colours.ink]]) {
      if (task === null || task < 0) continue;
      for (const lane of visible) {
        const i = indexIn(lane, task);
        if (i < 0) continue;
        const [top, size] = box(lane, i);
        pen.strokeStyle = colour;
        pen.lineWidth = 2;
        pen.strokeRect(x(start[task]) - 1, top - 1, Math.max(x(finish[task]) - x(start[task]), 1) + 2, size + 2);
      }
    }
    if (view.at >= 0) line(pen, height);
    pen.restore();
    for (const lane of visible) {
      const middle = lane.top - view.y + lane.height / 2;
      if (middle < AXIS + 4) continue;
      pen.fillStyle = lane.link ? colours.soft : colours.ink;
      pen.fillText(fitted(pen, lane.name, GUTTER - 52), 4, middle);
      pen.textAlign = "right";
      pen.fillStyle = colours.soft;
      pen.fillText(percent(lane.busy), GUTTER - 10, middle);
      pen.textAlign = "left";
    }
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, view.width, AXIS);
    pen.fillStyle = colours.soft;
    pen.textAlign = "right";
    pen.fillText("busy", GUTTER - 10, AXIS / 2);
    pen.textAlign = "center";
    const unit = view.to >= 1 ? [1, "s"] : view.to >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.min(Math.max(0, Math.ceil(-Math.log10(step * unit[0]) - 1e-9)), 7);
    for (const mark of marks) {
      const words = `${(mark * unit[0]).toFixed(digits)} ${unit[1]}`, half = pen.measureText(words).width / 2;
      pen.fillText(words, Math.min(Math.max(x(mark), GUTTER + half), view.width - half - 2), AXIS / 2);
    }
    pen.textAlign = "left";
    if (stack > height) {
      const room = height - AXIS;
      pen.fillStyle = colours.line;
      pen.fillRect(view.width - 5, AXIS + (room * view.y) / (stack - AXIS), 4, (room * room) / (stack - AXIS));
    }
    Object.assign(canvas.dataset, { gutter: GUTTER, axis: AXIS, edge: right() });
    canvas.dataset.from = view.from;
    canvas.dataset.to = view.to;
  };
  const line = (pen, height) => {
    pen.strokeStyle = colours.soft;
    pen.lineWidth = 1;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(Math.round(x(view.at)) + 0.5, 0);
    pen.lineTo(Math.round(x(view.at)) + 0.5, height);
    pen.stroke();
    pen.setLineDash([]);
  };
  const valueAt = (times, time) => {
    let low = 0, high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= time) low = middle + 1; else high = middle;
    }
    return Math.max(low - 1, 0);
  };
  const drawMemory = () => {
    const pen = prepare(second, memory.length * MEMORY_ROW);
    const width = second.parentElement.clientWidth;
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, width, memory.length * MEMORY_ROW);
    memory.forEach((each, index) => {
      const floor = (index + 1) * MEMORY_ROW - 4, room = MEMORY_ROW - 12;
      const scale = room / Math.max(each.limit, each.peak), y = (value) => floor - value * scale;
      const over = each.peak > each.limit;
      pen.save();
      pen.beginPath();
      pen.rect(GUTTER, 0, right() - GUTTER, memory.length * MEMORY_ROW);
      pen.clip();
      pen.fillStyle = over ? colours.bad : colours.fill[1];
      pen.beginPath();
      const first = valueAt(each.times, view.from);
      pen.moveTo(GUTTER, floor);
      let level = floor;
      for (let i = first; i < each.times.length && each.times[i] <= view.to; i++) {
        const px = Math.max(x(each.times[i]), GUTTER);
        if (i === first) pen.lineTo(px, y(each.bytes[i])); else { pen.lineTo(px, level); pen.lineTo(px, y(each.bytes[i])); }
        level = y(each.bytes[i]);
      }
      pen.lineTo(x(Math.min(view.to, whole)), level);
      pen.lineTo(x(Math.min(view.to, whole)), floor);
      pen.closePath();
      pen.globalAlpha = 0.75;
      pen.fill();
      pen.globalAlpha = 1;
      pen.strokeStyle = over ? colours.ink : colours.soft;
      pen.setLineDash([5, 3]);
      pen.beginPath();
      pen.moveTo(GUTTER, y(each.limit));
      pen.lineTo(right(), y(each.limit));
      pen.stroke();
      pen.setLineDash([]);
      if (view.at >= 0) {
        const words = bytes(each.bytes[valueAt(each.times, view.at)]), wide = pen.measureText(words).width;
        const px = x(view.at) + 6 + wide > right() ? x(view.at) - wide - 6 : x(view.at) + 6;
        line(pen, memory.length * MEMORY_ROW);
        pen.fillStyle = colours.card;
        pen.globalAlpha = 0.8;
        pen.fillRect(px - 3, floor - room / 2 - 8, wide + 6, 16);
        pen.globalAlpha = 1;
        pen.fillStyle = colours.ink;
        pen.fillText(words, px, floor - room / 2);
      }
      pen.restore();
      pen.fillStyle = colours.ink;
      pen.fillText(fitted(pen, each.name, GUTTER - 14), 4, floor - room / 2 - 7);
      pen.fillStyle = over ? colours.bad : colours.soft;
      pen.fillText(fitted(pen, `peak ${bytes(each.peak)} of ${bytes(each.limit)}`, GUTTER - 14), 4, floor - room / 2 + 8);
      pen.strokeStyle = colours.grid;
      pen.beginPath();
      pen.moveTo(0, floor + 3.5);
      pen.lineTo(width, floor + 3.5);
      pen.stroke();
    });
  };

  // --- finding tasks ---------------------------------------------------------------------------
  const indexIn = (lane, task) => {
    for (let i = firstFrom(lane, start[task]); i < lane.tasks.length && start[lane.tasks[i]] === start[task]; i++) {
      if (lane.tasks[i] === task) return i;
    }
    return -1;
  };
  const hit = (px, py) => {
    const lane = py < AXIS ? undefined : lanes.find((each) => py + view.y >= each.top && py + view.y < each.top + each.height);
    if (!lane || px < GUTTER) return null;
    const time = timeAt(px), slack = timeAt(px + 2) - time;
    let best = null, nearest = Infinity;
    for (let i = firstFrom(lane, time - lane.longest - slack); i < lane.tasks.length; i++) {
      const task = lane.tasks[i];
      if (start[task] > time + slack) break;
      const [top, size] = box(lane, i);
      const aside = Math.max(top - py, py - top - size, 0) * slack;
      const away = Math.max(start[task] - time, time - finish[task], 0) + aside + (stands(task) ? 0 : slack);
      if (finish[task] >= time - slack && away <= nearest) { nearest = away; best = { task, lane }; }
    }
    return best;
  };
  const tell = (target, px, py) => {
    const head = document.createElement("b");
    head.textContent = data.names[nameOf[target.task]];
    tip.replaceChildren(head, ...facts(target.task, target.lane).map((words) => {
      const row = document.createElement("div");
      row.textContent = words;
      return row;
    }));
    tip.hidden = false;
    const left = px + 16 + tip.offsetWidth > view.width ? px - tip.offsetWidth - 12 : px + 16;
    const top = py + 14 + tip.offsetHeight > view.height ? py - tip.offsetHeight - 10 : py + 14;
    tip.style.left = `${Math.max(left, 0)}px`;
    tip.style.top = `${Math.max(top, 0)}px`;
  };
  const pick = (target) => {
    view.picked = target ? target.task : -1;
    if (target) view.lane = lanes.indexOf(target.lane);
    details.textContent = target ? [data.names[nameOf[target.task]], ...facts(target.task, target.lane)].join(" · ") : "";
    redraw();
  };
  const chooseLane = (by) => {
    view.lane = Math.min(Math.max(view.lane < 0 ? 0 : view.lane + by, 0), lanes.length - 1);
    const lane = lanes[view.lane];
    if (!lane) return;
    if (lane.top - view.y < AXIS) scroll(lane.top - view.y - AXIS);
    if (lane.top + lane.height - view.y > view.height) scroll(lane.top + lane.height - view.y - view.height);
    view.picked = -1;
    details.textContent = `${lane.name}: ${lane.tasks.length} tasks, busy ${percent(lane.busy)} of the time`;
    redraw();
  };
  const stepTask = (by) => {
    const lane = lanes[Math.max(view.lane, 0)];
    if (!lane || !lane.tasks.length) return;
    let i = view.picked < 0 ? -1 : indexIn(lane, view.picked);
    i = i < 0 ? Math.min(firstFrom(lane, view.from), lane.tasks.length - 1) : Math.min(Math.max(i + by, 0), lane.tasks.length - 1);
    pick({ task: lane.tasks[i], lane });
    const middle = (start[view.picked] + finish[view.picked]) / 2, half = (view.to - view.from) / 2;
    if (middle < view.from || middle > view.to) show(middle - half, middle + half);
  };
  const togglePath = () => {
    showPath = !showPath;
    $("critical").setAttribute("aria-pressed", showPath);
    redraw();
  };

  // --- what people do --------------------------------------------------------------------------
  let drag = null;
  const at = (event) => {
    const frame = canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };
  const away = () => {
    tip.hidden = true;
    view.hover = null;
    view.at = NaN;
    redraw();
  };
  canvas.addEventListener("wheel", (event) => {
    const [px] = at(event);
    const unit = event.deltaMode === 1 ? 30 : 1;
    if (event.shiftKey) scroll((event.deltaY || event.deltaX) * unit);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX * unit) / view.width);
    else if (event.deltaY > 0 && view.to - view.from >= whole * 0.999999) return;  // the page scrolls on
    else zoom(Math.exp(Math.min(Math.max(event.deltaY * unit, -240), 240) * 0.0025), Math.max(timeAt(px), view.from));
    event.preventDefault();
    tip.hidden = true;
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: view.y, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = at(event);
    if (drag) {
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      drag.moved = true;
      canvas.classList.add("dragging");
      tip.hidden = true;
      const span = drag.to - drag.from;
      const shift = Math.min(Math.max((-dx / (right() - GUTTER)) * span, -drag.from), whole - drag.to);
      view.y = drag.top;
      scroll(-dy);
      show(drag.from + shift, drag.from + shift + span);
      return;
    }
    const target = hit(px, py);
    view.at = px >= GUTTER && px <= right() ? timeAt(px) : NaN;
    view.hover = target ? target.task : null;
    if (target) tell(target, px, py); else tip.hidden = true;
    redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) pick(hit(...at(event)));
    drag = null;
    canvas.classList.remove("dragging");
  });
  canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointerleave", away);
  canvas.addEventListener("dblclick", (event) => zoom(0.25, timeAt(at(event)[0])));
  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), _: () => zoom(2),
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => chooseLane(-1), ArrowDown: () => chooseLane(1),
    PageUp: () => scroll(-view.height / 2), PageDown: () => scroll(view.height / 2),
    0: () => show(0, whole), Home: () => show(0, whole), ",": () => stepTask(-1), ".": () => stepTask(1), c: togglePath,
    Enter: () => {
      if (view.picked < 0) return;
      const length = Math.max(finish[view.picked] - start[view.picked], closest);
      show(start[view.picked] - length, finish[view.picked] + length);
    },
    Escape: () => { view.lane = -1; away(); pick(null); },
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    keys[event.key]();
    event.preventDefault();
  });
  second.addEventListener("pointermove", (event) => {
    const px = event.clientX - second.getBoundingClientRect().left;
    view.at = px >= GUTTER && px <= right() ? timeAt(px) : NaN;
    redraw();
  });
  second.addEventListener("pointerleave", away);
  $("in").addEventListener("click", () => zoom(0.5));
  $("out").addEventListener("click", () => zoom(2));
  $("reset").addEventListener("click", () => { view.y = 0; show(0, whole); });
  $("critical").addEventListener("click", togglePath);
  $("links").addEventListener("click", (event) => {
    const shown = event.currentTarget.getAttribute("aria-pressed") !== "true";
    event.currentTarget.setAttribute("aria-pressed", shown);
    layOut(shown);
    view.lane = -1;
    redraw();
  });
  $("find").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    found = wanted ? data.names.map((name) => name.toLowerCase().includes(wanted)) : null;
    redraw();
  });
  for (const [id, open] of [["open", true], ["close", false]]) {
    $(id).addEventListener("click", () => {
      for (const each of document.querySelectorAll(".tree details")) each.open = open;
    });
  }
  const used = new Set(category);
  data.categories.forEach((words, index) => {
    if (!used.has(index)) return;
    const button = document.createElement("button"), swatch = document.createElement("i"), item = document.createElement("li");
    swatch.style.background = `var(--c${index})`;
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.append(swatch, words);
    button.addEventListener("click", () => {
      only = only === index ? -1 : index;
      for (const each of $("legend").querySelectorAll("button")) each.setAttribute("aria-pressed", only >= 0 && each === button);
      redraw();
    });
    item.append(button);
    $("legend").append(item);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
  new ResizeObserver(redraw).observe(canvas.parentElement);
  window.addEventListener("resize", redraw);
  readColours();
  draw();
  drawMemory();
})();
