// Draw a slot's line of boxes. Boxes narrower than a pixel are blended, so that the cost is bounded by the pixels.

const INSET = 3;
const WIDE = 1.5; // pixels from which a box is drawn by itself

const fills = data.ops.map((op) => parts(op.fill));
const shades = new Map();

// Relative luminance of WCAG 2, as in the library's palette.py.
function luminance(colour) {
  const linear = colour.map((part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

// Fill and text colour of an operation on a stage, cached; later chunks are paler.
function shadeOf(panel, op, stageNumber) {
  const pale = panel.chunks > 1 ? (data.palest * panel.chunk[stageNumber]) / (panel.chunks - 1) : 0;
  const key = op + pale;
  if (!shades.has(key)) {
    const colour = fills[op].map((part) => Math.round(part + (255 - part) * pale));
    shades.set(key, { fill: `rgb(${colour.join()})`, ink: luminance(colour) > 0.18 ? "#10151c" : "#ffffff" });
  }
  return shades.get(key);
}

function firstVisible(table, slot) {
  const low = table.at[slot];
  return Math.max(low, firstAfter(table.start, view.t0, low, table.at[slot + 1]) - 1);
}

function drawBoxes(pen, row, count) {
  const { panel, slot } = row;
  const boxes = panel.boxes;
  const y = row.y + INSET;
  const tall = row.height - 2 * INSET;
  const stop = boxes.at[slot + 1];
  let pixel = layout.left; // the first unpainted one
  for (let i = firstVisible(boxes, slot); i < stop && boxes.start[i] <= view.t1; ) {
    const x0 = X(boxes.start[i]);
    const x1 = X(boxes.end[i]);
    if (x1 < layout.left) {
      i++;
      continue;
    }
    count.boxes++;
    if (x1 - x0 >= WIDE) {
      drawBox(pen, panel, i, x0, x1, y, tall);
      i++;
    } else {
      pixel = Math.max(pixel, Math.floor(x0));
      i = drawBlend(pen, panel, slot, i, pixel, y, tall);
      pixel++;
    }
  }
}

function drawBox(pen, panel, i, x0, x1, y, tall) {
  const boxes = panel.boxes;
  const left = Math.max(x0, layout.left - 2);
  const right = Math.min(x1, layout.right + 2);
  const gap = x1 - x0 > 4 ? 0.5 : 0; // a thin line between neighbours
  const pair = boxes.op[i] === OP.FB;
  const faded = shown.pinned >= 0 && boxes.microbatch[i] !== shown.pinned;
  const alsoFaded = shown.pinned >= 0 && pair && boxes.joined_microbatch[i] !== shown.pinned;
  const high = pair ? tall / 2 : tall;
  const paint = (op, stageNumber, microbatch, top, quiet) => {
    const shade = shadeOf(panel, op, stageNumber);
    pen.globalAlpha = quiet ? 0.2 : 1;
    pen.fillStyle = shade.fill;
    pen.fillRect(left + gap, top, right - left - 2 * gap, high);
    if (right - left >= 10 && microbatch >= 0) writeIn(pen, panel, i, microbatch, shade, left, right, top, high, pair);
  };
  paint(pair ? OP.F : boxes.op[i], boxes.stage[i], boxes.microbatch[i], y, faded);
  if (pair) paint(OP.B, boxes.joined_stage[i], boxes.joined_microbatch[i], y + high, alsoFaded);
  pen.globalAlpha = 1;
}

// Draw the whole word if it fits, else the micro-batch if it fits.
function writeIn(pen, panel, i, microbatch, shade, left, right, top, high, pair) {
  const size = pair ? Math.min(10, high - 1) : 11;
  const room = (right - left - 4) / (size * 0.62);
  const word = pair ? "" : wordOf(panel.boxes, i);
  const text = right - left >= 44 && word.length <= room && word ? word : String(microbatch);
  if (text.length > room) return;
  pen.font = size + "px system-ui, sans-serif";
  pen.fillStyle = shade.ink;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(text, (left + right) / 2, top + high / 2 + 0.5);
}

// Return the seconds that a slot spends in an operation up to a moment, from the running sums of its boxes.
function workedUntil(boxes, sum, op, low, next, time) {
  if (next === low) return sum[low];
  const last = next - 1;
  const since = Math.min(Math.max(time - boxes.start[last], 0), boxes.end[last] - boxes.start[last]);
  return sum[last] + (boxes.op[last] === op ? since : 0);
}

// Draw one pixel of many boxes in the mean colour of boxes and idle time. Return the next box to draw.
function drawBlend(pen, panel, slot, i, pixel, y, tall) {
  const boxes = panel.boxes;
  const [low, stop] = [boxes.at[slot], boxes.at[slot + 1]];
  const [from, to] = [timeAt(pixel), timeAt(pixel + 1)];
  const before = firstFrom(boxes.start, from, low, stop);
  const next = firstFrom(boxes.start, to, Math.max(i, before), stop);
  const mean = [0, 0, 0];
  let worked = 0;
  for (const [op, sum] of panel.running) {
    const time = workedUntil(boxes, sum, op, low, next, to) - workedUntil(boxes, sum, op, low, before, from);
    const share = Math.min(time / (to - from), 1);
    worked += share;
    if (share > 0) for (let at = 0; at < 3; at++) mean[at] += fills[op][at] * share;
  }
  const idle = Math.max(0, 1 - worked);
  const alone = next === i + 1 && worked < 0.5; // a single short box, such as an update, must stay visible
  pen.fillStyle = alone
    ? shadeOf(panel, boxes.op[i], boxes.stage[i]).fill
    : `rgb(${mean.map((part, at) => Math.round(part / Math.max(worked, 1) + theme.idleParts[at] * idle)).join()})`;
  pen.globalAlpha = shown.pinned >= 0 ? 0.3 : 1;
  pen.fillRect(pixel, y, 1, tall);
  pen.globalAlpha = 1;
  return next > i && boxes.end[next - 1] > to ? next - 1 : Math.max(next, i + 1);
}

// Draw reductions, which overlap with compute, as thin bars at the bottom of the line.
function drawBeside(pen, row, count) {
  const table = row.panel.beside;
  const stop = table.at[row.slot + 1];
  pen.fillStyle = data.ops[OP.REDUCE].fill;
  let painted = -1;
  for (let i = firstVisible(table, row.slot); i < stop && table.start[i] <= view.t1; i++) {
    const x0 = X(table.start[i]);
    const x1 = Math.max(X(table.end[i]), x0 + 1);
    if (x1 < layout.left || x1 <= painted) continue;
    pen.fillRect(x0, row.y + row.height - INSET - 5, x1 - x0, 5);
    painted = Math.max(painted, Math.ceil(x1));
    count.boxes++;
  }
}

// Draw transfers from line to line, at most one per three pixels between the same two lines.
function drawHops(pen, panel, rows, count) {
  const hops = panel.hops;
  const last = new Map();
  const step = (3 * (view.t1 - view.t0)) / (layout.right - layout.left);
  const first = firstFrom(hops.start, view.t0 - panel.longestHop, 0, hops.start.length);
  const paths = { [OP.SEND_F]: new Path2D(), 7: new Path2D() };
  for (let i = first; i < hops.start.length && hops.start[i] <= view.t1; i++) {
    if (shown.pinned >= 0 && hops.microbatch[i] !== shown.pinned) continue;
    const pair = hops.source[i] * 65536 + hops.target[i];
    if (hops.end[i] < view.t0 || hops.start[i] - (last.has(pair) ? last.get(pair) : -Infinity) < step) continue;
    last.set(pair, hops.start[i]);
    const [x0, y0, x1, y1] = hopLine(hops, i, rows);
    paths[hops.op[i]].moveTo(x0, y0);
    paths[hops.op[i]].lineTo(x1, y1);
    count.hops++;
  }
  pen.lineWidth = 1;
  pen.globalAlpha = 0.75;
  for (const [op, path] of Object.entries(paths)) {
    pen.strokeStyle = data.ops[op].fill;
    pen.stroke(path);
  }
  pen.globalAlpha = 1;
}

function hopLine(hops, i, rows) {
  const source = rows[hops.source[i]];
  const target = rows[hops.target[i]];
  const down = target.y > source.y;
  const from = down ? source.y + source.height - INSET : source.y + INSET;
  const to = down ? target.y + INSET : target.y + target.height - INSET;
  return [X(hops.start[i]), from, X(hops.end[i]), to];
}
