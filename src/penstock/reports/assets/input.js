// Input from wheel, pointer, keys and buttons.

const pointers = new Map();
let pressed = null; // position of the pressed pointer; a press without movement is a click

const local = (event) => {
  const bounds = canvas.getBoundingClientRect();
  return [event.clientX - bounds.left, event.clientY - bounds.top + scrolled()];
};

// The wheel alone scrolls the page, which may be taller than the window. Browsers report a pinch as Ctrl and wheel.
function onWheel(event) {
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const zooming = event.ctrlKey || event.metaKey || event.currentTarget === axis;
  if (!sideways && !zooming) return;
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : 1;
  if (sideways) {
    pan((event.deltaX || event.deltaY) * unit);
  } else {
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * unit * 0.002))), local(event)[0]);
  }
}

function onDown(event) {
  if (event.button) return;
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, local(event));
  pressed = { x: event.clientX, y: event.clientY, moved: false };
}

function onMove(event) {
  const [x, y] = local(event);
  if (!pointers.has(event.pointerId)) return point(find(x, y), x, event.clientX, event.clientY);
  const before = [...pointers.values()];
  const mine = pointers.get(event.pointerId);
  pointers.set(event.pointerId, [x, y]);
  const after = [...pointers.values()];
  if (Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y) > 3 && !pressed.moved) {
    pressed.moved = true;
    canvas.classList.add("dragging");
    unpoint();
  }
  if (!pressed.moved) return;
  if (after.length === 2) {
    const wide = (points) => Math.max(Math.abs(points[0][0] - points[1][0]), 8);
    zoom(wide(before) / wide(after), (after[0][0] + after[1][0]) / 2);
  } else {
    pan(mine[0] - x);
  }
}

function onUp(event) {
  if (!pointers.delete(event.pointerId)) return;
  canvas.classList.remove("dragging");
  if (pressed.moved || event.type === "pointercancel") return;
  const [x, y] = local(event);
  point(find(x, y), x, event.clientX, event.clientY);
  follow();
}

// Highlight the micro-batch under the pointer, or end the highlight.
function follow() {
  const microbatch = hover.index >= 0 ? hover.table.microbatch[hover.index] : -1;
  shown.pinned = microbatch === shown.pinned ? -1 : microbatch;
  redraw();
}

// Select a box by keys: scroll it into view and show its tooltip.
function select(row, index) {
  const boxes = row.panel.boxes;
  if (index < boxes.at[row.slot] || index >= boxes.at[row.slot + 1]) return;
  const middle = (boxes.start[index] + boxes.end[index]) / 2;
  const wide = view.t1 - view.t0;
  if (middle < view.t0 || middle > view.t1) setView(middle - wide / 2, middle + wide / 2);
  const bounds = canvas.getBoundingClientRect();
  const y = bounds.top + row.y + row.height / 2 - scrolled();
  point({ row, table: boxes, index }, X(middle), bounds.left + X(middle), y);
}

function step(along, across) {
  const rows = layout.rows.filter((row) => row.kind === "boxes");
  const at = rows.indexOf(hover.row);
  const row = rows[Math.min(Math.max(at + across, 0), rows.length - 1)];
  const { boxes } = row.panel;
  if (at < 0) return select(row, firstVisible(boxes, row.slot));
  if (across) return select(row, firstFrom(boxes.start, timeAt(hover.x), boxes.at[row.slot], boxes.at[row.slot + 1] - 1));
  select(row, (hover.table === boxes ? hover.index : firstVisible(boxes, row.slot)) + along);
}

const KEYS = {
  "+": () => zoom(0.5),
  "=": () => zoom(0.5),
  "-": () => zoom(2),
  _: () => zoom(2),
  0: () => setView(0, data.span),
  ArrowLeft: () => pan(-80),
  ArrowRight: () => pan(80),
  ArrowUp: () => step(0, -1),
  ArrowDown: () => step(0, 1),
  ".": () => step(1, 0),
  ",": () => step(-1, 0),
  Enter: follow,
  Escape: () => {
    shown.pinned = -1;
    unpoint();
  },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
}

function listen() {
  for (const place of [canvas, axis]) place.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("pointerdown", onDown);
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerup", onUp);
  canvas.addEventListener("pointercancel", onUp);
  canvas.addEventListener("pointerleave", () => pointers.size || unpoint());
  canvas.addEventListener("dblclick", () => setView(0, data.span));
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("blur", unpoint);
  document.getElementById("in").addEventListener("click", () => zoom(0.5));
  document.getElementById("out").addEventListener("click", () => zoom(2));
  document.getElementById("reset").addEventListener("click", () => setView(0, data.span));
  for (const name of ["hops", "memory"]) {
    document.getElementById(name).addEventListener("change", (event) => {
      shown[name] = event.target.checked;
      remeasure();
    });
  }
  window.addEventListener("resize", remeasure);
  window.addEventListener("scroll", redraw, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readTheme();
    redraw();
  });
}

function remeasure() {
  measure();
  redraw();
}
