// Find the item under the pointer, and show its tooltip.

const tip = document.getElementById("tip");

function covering(table, slot, time, slack) {
  const low = table.at[slot];
  const i = firstAfter(table.start, time + slack, low, table.at[slot + 1]) - 1;
  return i >= low && table.end[i] >= time - slack ? i : -1;
}

function hopNear(panel, x, y) {
  if (!shown.hops) return -1;
  const rows = layout.rows.filter((row) => row.panel === panel && row.kind === "boxes");
  const { hops, longestHop } = panel;
  const reach = timeAt(x + 4) - timeAt(x);
  const first = firstFrom(hops.start, timeAt(x) - longestHop - reach, 0, hops.start.length);
  for (let i = first; i < hops.start.length && hops.start[i] <= timeAt(x) + reach; i++) {
    const [x0, y0, x1, y1] = hopLine(hops, i, rows);
    const along = Math.min(Math.max(((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2 || 1), 0), 1);
    if (Math.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0)) < 3) return i;
  }
  return -1;
}

// Return the table and index of the item at a point; index -1 if there is none.
function find(x, y) {
  const row = rowAt(y);
  if (!row || x < layout.left || x > layout.right) return { row: null, table: null, index: -1 };
  if (row.kind === "memory") return { row, table: null, index: -1 };
  const { panel, slot } = row;
  const time = timeAt(x);
  const pixel = timeAt(x + 1) - time;
  const inside = y >= row.y + INSET && y < row.y + row.height - INSET;
  if (y >= row.y + row.height - INSET - 6) {
    const index = covering(panel.beside, slot, time, pixel / 2);
    if (index >= 0) return { row, table: panel.beside, index };
  }
  const index = inside ? covering(panel.boxes, slot, time, 0) : -1;
  if (index >= 0) return { row, table: panel.boxes, index };
  const hop = hopNear(panel, x, y);
  if (hop >= 0) return { row, table: panel.hops, index: hop };
  const near = inside ? covering(panel.boxes, slot, time, pixel) : -1;
  if (near >= 0) return { row, table: panel.boxes, index: near };
  const wait = inside ? covering(panel.waits, slot, time, 0) : -1;
  return { row, table: wait >= 0 ? panel.waits : null, index: wait };
}

// Idle time has no action.
function idleDetails(row, time) {
  const boxes = row.panel.boxes;
  const next = firstAfter(boxes.start, time, boxes.at[row.slot], boxes.at[row.slot + 1]);
  const from = next > boxes.at[row.slot] ? boxes.end[next - 1] : 0;
  const to = next < boxes.at[row.slot + 1] ? boxes.start[next] : row.panel.span;
  if (to <= from) return null;
  const pairs = [["start", seconds(from)], ["end", seconds(to)], ["duration", seconds(to - from)]];
  return { word: "idle", pairs: [["slot", row.panel.slots[row.slot].slot], ...pairs] };
}

function tell(found, x) {
  if (!found.row) return null;
  if (found.row.kind === "memory") return memoryDetails(found.row, timeAt(x));
  if (found.index < 0) return idleDetails(found.row, timeAt(x));
  const slot = found.table === found.row.panel.hops ? found.table.source[found.index] : found.row.slot;
  return details(found.row.panel, found.table, found.index, slot);
}

function point(found, x, clientX, clientY) {
  Object.assign(hover, { ...found, x, told: tell(found, x) });
  canvas.classList.toggle("pointing", found.index >= 0);
  showTip(clientX, clientY);
  redraw();
}

function unpoint() {
  point({ row: null, table: null, index: -1 }, -1, 0, 0);
}

function showTip(clientX, clientY) {
  tip.hidden = !hover.told;
  if (!hover.told) return;
  const heading = document.createElement("strong");
  heading.textContent = hover.told.word;
  const table = document.createElement("table");
  for (const [name, value] of hover.told.pairs) {
    const line = table.insertRow();
    line.appendChild(document.createElement("th")).textContent = name;
    line.insertCell().textContent = value;
  }
  tip.replaceChildren(heading, table);
  const { width, height } = tip.getBoundingClientRect();
  const left = clientX + 16 + width < window.innerWidth ? clientX + 16 : clientX - 16 - width;
  const top = clientY + 16 + height < window.innerHeight ? clientY + 16 : clientY - 16 - height;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, top) + "px";
}
