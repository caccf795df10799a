// Draw one frame: the visible rows, from back to front.

const hover = { row: null, table: null, index: -1, slot: -1, x: -1, told: null };
const drawn = { boxes: 0, hops: 0, points: 0, rows: 0, ms: 0, frames: 0 };
let waiting = false;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

function tickStep(wanted) {
  const raw = (view.t1 - view.t0) / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9));
}

function* tickTimes() {
  const step = tickStep((layout.right - layout.left) / 90);
  for (let n = Math.ceil(view.t0 / step - 1e-9); n * step <= view.t1 * (1 + 1e-12); n++) yield [n * step || 0, step];
}

function draw() {
  const began = performance.now();
  Object.assign(drawn, { boxes: 0, hops: 0, points: 0, rows: 0 });
  const top = scrolled();
  const bottom = top + canvas.clientHeight;
  const pen = canvas.getContext("2d");
  pen.setTransform(layout.ratio, 0, 0, layout.ratio, 0, -top * layout.ratio);
  pen.fillStyle = theme.ground;
  pen.fillRect(0, top, layout.width, bottom - top);
  const rows = layout.rows.filter((row) => row.y < bottom && row.y + row.height > top);
  drawn.rows = rows.length;
  drawGround(pen, rows, top, bottom);
  pen.save();
  pen.beginPath();
  pen.rect(layout.left, top, layout.right - layout.left, bottom - top);
  pen.clip();
  for (const row of rows) (row.kind === "boxes" ? drawBoxes : drawMemory)(pen, row, drawn);
  if (shown.hops) {
    for (const panel of panels) {
      const mine = layout.rows.filter((row) => row.panel === panel && row.kind === "boxes");
      if (mine.some((row) => rows.includes(row))) drawHops(pen, panel, mine, drawn);
    }
  }
  for (const row of rows) if (row.kind === "boxes") drawBeside(pen, row, drawn);
  drawHover(pen, top, bottom);
  pen.restore();
  drawAxis();
  drawn.ms = performance.now() - began;
  drawn.frames++;
}

// Draw idle lines, ticks and labels.
function drawGround(pen, rows, top, bottom) {
  pen.fillStyle = theme.idle;
  for (const row of rows) {
    if (row.kind === "boxes") {
      pen.fillRect(layout.left, row.y + INSET, layout.right - layout.left, row.height - 2 * INSET);
    }
  }
  pen.fillStyle = theme.grid;
  for (const [time] of tickTimes()) pen.fillRect(Math.round(X(time)), top, 1, bottom - top);
  pen.textBaseline = "middle";
  for (const row of rows) {
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = theme.quiet;
    pen.textAlign = "right";
    pen.fillText(row.panel.slots[row.slot].slot, layout.left - 8, row.y + row.height / 2);
    if (row.kind === "memory" && layout.width > 600) {
      pen.textAlign = "left";
      pen.fillText(amount(row.panel.memory.slots[row.slot].peak, row.panel.memory.bytes), layout.right + 6, row.y + row.height - 8);
    }
  }
  pen.fillStyle = theme.text;
  pen.font = "600 13px system-ui, sans-serif";
  pen.textAlign = "left";
  for (const head of layout.heads) pen.fillText(head.text, 0, head.y + 14, layout.width);
}

function drawHover(pen, top, bottom) {
  if (hover.x >= layout.left && hover.x <= layout.right) {
    pen.fillStyle = theme.line;
    pen.fillRect(Math.round(hover.x), top, 1, bottom - top);
  }
  if (hover.index < 0) return;
  pen.strokeStyle = theme.text;
  pen.lineWidth = 2;
  const { table, index, row } = hover;
  if (table === row.panel.hops) {
    const mine = layout.rows.filter((other) => other.panel === row.panel && other.kind === "boxes");
    const [x0, y0, x1, y1] = hopLine(table, index, mine);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  } else if (table !== row.panel.waits) {
    const x0 = Math.max(X(table.start[index]), layout.left - 4);
    const x1 = Math.min(X(table.end[index]), layout.right + 4);
    const tall = table === row.panel.beside ? 5 : row.height - 2 * INSET;
    pen.strokeRect(x0 + 1, row.y + row.height - INSET - tall + 1, Math.max(x1 - x0 - 2, 1), tall - 2);
  }
}

// Draw the time axis, and below it a bar for the visible part of the timeline.
function drawAxis() {
  const pen = axis.getContext("2d");
  pen.setTransform(layout.ratio, 0, 0, layout.ratio, 0, 0);
  pen.clearRect(0, 0, layout.width, AXIS_HEIGHT);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  pen.fillStyle = theme.quiet;
  const [unit, scale] = timeUnit(Math.max(Math.abs(view.t1), 0));
  for (const [time, step] of tickTimes()) {
    const places = Math.max(0, Math.min(12, -Math.floor(Math.log10(step / scale) + 1e-9)));
    const text = (time / scale).toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: places });
    const half = pen.measureText(text + " " + unit).width / 2;
    const x = X(time);
    if (x - half >= 0 && x + half <= layout.width) pen.fillText(text + " " + unit, x, 13);
    pen.fillRect(Math.round(x), 23, 1, 4);
  }
  const wide = layout.right - layout.left;
  pen.fillStyle = theme.idle;
  pen.fillRect(layout.left, 30, wide, 3);
  if (view.t1 - view.t0 >= data.span) return;
  pen.fillStyle = theme.quiet;
  const from = (view.t0 / data.span) * wide;
  pen.fillRect(layout.left + from, 30, Math.max(((view.t1 - view.t0) / data.span) * wide, 3), 3);
}
