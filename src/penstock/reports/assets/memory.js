// Draw a slot's memory as stacked step functions, with one scale for all slots of a timeline.

const MEMORY_INSET = 6;

// Return the points to draw: the highest of each pixel, which keeps all peaks, and the last.
function stairs(curve) {
  const { times, total } = curve;
  const stop = firstAfter(times, view.t1, 0, times.length);
  const points = [];
  for (let i = Math.max(0, firstAfter(times, view.t0, 0, times.length) - 1); i < stop; ) {
    const next = Math.max(i + 1, firstFrom(times, timeAt(Math.floor(X(times[i])) + 1), i, stop));
    let highest = i;
    for (let j = i + 1; j < next; j++) if (total[j] > total[highest]) highest = j;
    points.push(highest);
    if (highest !== next - 1) points.push(next - 1);
    i = next;
  }
  return points;
}

function drawMemory(pen, row, count) {
  const { panel, slot } = row;
  const curve = panel.memory.slots[slot];
  const base = row.y + row.height;
  const scale = (row.height - MEMORY_INSET) / (panel.memory.peak || 1);
  const points = stairs(curve);
  const end = Math.min(X(panel.span), layout.right);
  count.points += points.length;
  const tops = new Float64Array(points.length);
  const areas = panel.memory.kinds.map((kind, at) => {
    points.forEach((point, i) => (tops[i] += curve.levels[at][point]));
    return [kind.fill, Float64Array.from(tops)];
  });
  for (const [fill, heights] of areas.reverse()) { // the highest first; lower ones are painted over it
    pen.fillStyle = fill;
    pen.beginPath();
    pen.moveTo(layout.left, base);
    points.forEach((point, i) => {
      const x0 = Math.max(X(curve.times[point]), layout.left);
      const x1 = i + 1 < points.length ? Math.max(X(curve.times[points[i + 1]]), layout.left) : end;
      const y = base - heights[i] * scale;
      pen.lineTo(x0, y);
      pen.lineTo(Math.max(x1, x0), y);
    });
    pen.lineTo(Math.max(end, layout.left), base);
    pen.fill();
  }
  pen.fillStyle = theme.line;
  pen.fillRect(layout.left, base - 1, layout.right - layout.left, 1);
}

function memoryDetails(row, time) {
  const { panel, slot } = row;
  const { times, levels, total, peak } = panel.memory.slots[slot];
  const at = Math.max(0, firstAfter(times, time, 0, times.length) - 1);
  const say = (value) => amount(value, panel.memory.bytes);
  const pairs = panel.memory.kinds.map((kind, k) => [kind.words, say(levels[k][at])]);
  pairs.push(["together", say(total[at])], ["peak", say(peak)]);
  return { word: panel.slots[slot].slot + " at " + seconds(time), pairs };
}
