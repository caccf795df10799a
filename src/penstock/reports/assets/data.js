// The data of the page, from base64 to typed arrays, and searches in them.

const TYPES = { i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };

function unpack(packed) {
  const raw = atob(packed.data);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new TYPES[packed.type](bytes.buffer);
}

function unpackAll(packed) {
  return Object.fromEntries(Object.entries(packed).map(([name, column]) => [name, unpack(column)]));
}

// Return the first i in [low, high) with values[i] >= wanted, else high.
function firstFrom(values, wanted, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Return the first i in [low, high) with values[i] > wanted, else high.
function firstAfter(values, wanted, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Running sums of the seconds of every operation up to each box, for pixels with many boxes.
function running(boxes) {
  const sums = new Map();
  for (let i = 0; i < boxes.op.length; i++) {
    if (!sums.has(boxes.op[i])) sums.set(boxes.op[i], new Float64Array(boxes.op.length + 1));
  }
  for (const [op, sum] of sums) {
    for (let i = 0; i < boxes.op.length; i++) {
      sum[i + 1] = sum[i] + (boxes.op[i] === op ? boxes.end[i] - boxes.start[i] : 0);
    }
  }
  return sums;
}

function longestOf(spans) {
  let most = 0;
  for (let i = 0; i < spans.start.length; i++) most = Math.max(most, spans.end[i] - spans.start[i]);
  return most;
}

function readCurve(slot) {
  const times = unpack(slot.times);
  const levels = slot.levels.map(unpack);
  const total = new Float64Array(times.length);
  for (const level of levels) for (let i = 0; i < total.length; i++) total[i] += level[i];
  return { times, levels, total, peak: total.reduce((most, here) => Math.max(most, here), 0) };
}

function readMemory(memory) {
  return memory && { ...memory, slots: memory.slots.map(readCurve) };
}

function readPanel(panel) {
  const boxes = unpackAll(panel.boxes);
  const hops = unpackAll(panel.hops);
  return {
    ...panel,
    boxes,
    hops,
    beside: unpackAll(panel.beside),
    waits: unpackAll(panel.waits),
    memory: readMemory(panel.memory),
    running: running(boxes),
    longestHop: longestOf(hops),
  };
}

const data = JSON.parse(document.getElementById("data").textContent);
const panels = data.panels.map(readPanel);
