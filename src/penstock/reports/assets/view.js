// The view: visible time span, positions of rows, colours of the theme.

const view = { t0: 0, t1: data.span };
const shown = { hops: true, memory: true, pinned: -1 };
const canvas = document.getElementById("canvas");
const axis = document.getElementById("axis");
const stage = document.getElementById("stage");
const layout = { left: 60, right: 0, width: 0, height: 0, rows: [], heads: [], ratio: 1 };
const AXIS_HEIGHT = 34;

const many = panels.reduce((sum, panel) => sum + panel.slots.length, 0) > 32;
const SIZES = many ? { box: 20, memory: 28, head: 24, gap: 14 } : { box: 32, memory: 44, head: 26, gap: 16 };

const X = (time) => layout.left + ((time - view.t0) / (view.t1 - view.t0)) * (layout.right - layout.left);
const timeAt = (x) => view.t0 + ((x - layout.left) / (layout.right - layout.left)) * (view.t1 - view.t0);

function shortest() {
  return data.span * 1e-7; // narrower views exceed the precision of floating point
}

function setView(t0, t1) {
  const wide = Math.min(Math.max(t1 - t0, shortest()), data.span);
  const first = Math.min(Math.max(t0, 0), data.span - wide);
  view.t0 = first;
  view.t1 = first + wide;
  redraw();
}

// Zoom by a factor, keeping the moment under x in place.
function zoom(factor, x = (layout.left + layout.right) / 2) {
  const at = timeAt(x);
  const wide = Math.min(Math.max((view.t1 - view.t0) * factor, shortest()), data.span);
  const share = (at - view.t0) / (view.t1 - view.t0);
  setView(at - share * wide, at - share * wide + wide);
}

function pan(pixels) {
  const moved = (pixels / (layout.right - layout.left)) * (view.t1 - view.t0);
  setView(view.t0 + moved, view.t1 + moved);
}

const theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "text", "quiet", "idle", "grid", "focus", "line"]) {
    theme[name] = style.getPropertyValue("--" + name).trim();
  }
  theme.idleParts = parts(theme.idle);
}

function parts(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

// Return the rows from top to bottom: all timelines, then the memory of each.
function placeRows() {
  const pen = canvas.getContext("2d");
  pen.font = "12px system-ui, sans-serif";
  const labels = panels.flatMap((panel) => panel.slots.map((slot) => pen.measureText(slot.slot).width));
  layout.left = Math.ceil(Math.max(40, ...labels)) + 12;
  layout.rows = [];
  layout.heads = [];
  let y = 4;
  const add = (panel, kind, height, head) => {
    if (head) layout.heads.push({ y, text: head });
    y += head ? SIZES.head : 0;
    panel.slots.forEach((_, slot) => layout.rows.push({ panel, kind, slot, y: y + slot * height, height }));
    y += panel.slots.length * height + SIZES.gap;
  };
  for (const panel of panels) add(panel, "boxes", SIZES.box, panels.length > 1 ? panel.label : "");
  for (const panel of panels) {
    if (!panel.memory || !shown.memory) continue;
    const name = panels.length > 1 ? "memory, " + panel.label : "memory";
    add(panel, "memory", SIZES.memory, panel.memory.unit ? name + ", " + panel.memory.unit : name);
  }
  layout.height = y;
}

// The canvas is at most as tall as the window: it stays in place while the page scrolls, and draws the rows at its position.
function measure() {
  placeRows();
  layout.ratio = window.devicePixelRatio || 1;
  layout.width = stage.clientWidth;
  layout.right = layout.width - (layout.width > 600 ? 68 : 8);
  stage.style.height = layout.height + "px";
  const tall = Math.min(layout.height, Math.max(window.innerHeight - AXIS_HEIGHT, 120));
  for (const [surface, height] of [[canvas, tall], [axis, AXIS_HEIGHT]]) {
    surface.style.height = height + "px";
    surface.width = Math.round(layout.width * layout.ratio);
    surface.height = Math.round(height * layout.ratio);
  }
}

const scrolled = () => canvas.offsetTop;

function rowAt(y) {
  return layout.rows.find((row) => y >= row.y && y < row.y + row.height);
}
