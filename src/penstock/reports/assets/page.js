// Fill the page around the picture (figures, legend, tables), then start.

function make(tag, text, parent) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function writeFigures() {
  const place = document.getElementById("figures");
  for (const panel of panels) {
    if (panels.length > 1) make("h2", panel.label, place);
    const list = make("dl", undefined, place);
    for (const [name, value] of panel.figures) {
      const card = make("div", undefined, list);
      make("dt", name, card);
      make("dd", value, card);
    }
  }
}

function writeTables() {
  const place = document.getElementById("tables");
  for (const panel of panels) {
    const fold = make("details", undefined, place);
    make("summary", panels.length > 1 ? "Slots, " + panel.label : "Slots", fold);
    const scroll = make("div", undefined, fold);
    scroll.className = "scroll";
    const table = make("table", undefined, scroll);
    const head = make("tr", undefined, make("thead", undefined, table));
    Object.keys(panel.slots[0]).forEach((name) => make("th", name, head));
    const body = make("tbody", undefined, table);
    for (const slot of panel.slots) {
      const line = make("tr", undefined, body);
      Object.values(slot).forEach((value) => make("td", value, line));
    }
  }
}

function entry(list, words, upper, lower = upper) {
  const item = make("li", undefined, list);
  const swatch = make("canvas", undefined, item);
  swatch.width = swatch.height = 24;
  const pen = swatch.getContext("2d");
  pen.fillStyle = upper;
  pen.fillRect(0, 0, 24, 24);
  pen.fillStyle = lower;
  pen.fillRect(0, 12, 24, 12);
  make("span", words, item);
}

function writeLegend() {
  const list = document.getElementById("legend");
  const ops = new Set(panels.flatMap((panel) => [...new Set([...panel.boxes.op, ...panel.beside.op])]));
  for (const op of [...ops].sort((a, b) => a - b)) {
    const { sign, words, fill } = data.ops[op];
    entry(list, sign + " " + words, fill, op === OP.FB ? data.ops[OP.B].fill : fill);
  }
  const chunked = panels.find((panel) => panel.chunks > 1);
  if (chunked) {
    const last = chunked.chunk.indexOf(chunked.chunks - 1);
    entry(list, "paler: later chunks of a rank", shadeOf(chunked, OP.F, last).fill);
  }
  const kinds = new Map(panels.flatMap((panel) => (panel.memory ? panel.memory.kinds.map((k) => [k.words, k.fill]) : [])));
  for (const [words, fill] of kinds) entry(list, "memory: " + words, fill);
}

// For tests: the visible range, the selected item, the time of the last frame, and the position of a box.
window.penstock = {
  get view() {
    return { ...view };
  },
  get hovered() {
    return hover.told && { word: hover.told.word, details: Object.fromEntries(hover.told.pairs) };
  },
  get drawn() {
    return { ...drawn };
  },
  get pinned() {
    return shown.pinned;
  },
  rows: (panel = 0, kind = "boxes") => layout.rows.filter((r) => r.panel === panels[panel] && r.kind === kind).length,
  place(panel, slot, time, kind = "boxes") {
    const row = layout.rows.find((r) => r.panel === panels[panel] && r.slot === slot && r.kind === kind);
    const bounds = canvas.getBoundingClientRect();
    return { x: bounds.left + X(time), y: bounds.top + row.y + row.height / 2 - scrolled() };
  },
};

canvas.setAttribute("aria-label", "Timeline: " + data.title);
document.getElementById("memory-label").hidden = !panels.some((panel) => panel.memory);
readTheme();
writeFigures();
writeLegend();
writeTables();
measure();
listen();
draw();
