// Text for actions, times and bytes.

const OP = { F: 0, B: 1, FB: 4, SEND_F: 5, RECV_B: 8, REDUCE: 9 };

// Return the word of a box, as the library prints and parses it.
function wordOf(table, i) {
  const op = table.op[i];
  const version = table.version[i] ? "@" + table.version[i] : "";
  const start = table.stage[i] + data.ops[op].letter;
  if (op >= OP.REDUCE) return start + version;
  if (op >= OP.SEND_F) {
    const sign = op % 2 ? ">" : "<"; // sends are 5 and 7, receives 6 and 8
    const replica = table.replica[i] > 0 ? "." + table.replica[i] : "";
    return start + table.microbatch[i] + sign + table.peer[i] + replica + version;
  }
  return start + table.microbatch[i] + version + (op === OP.FB ? "&" + joinedWord(table, i) : "");
}

function joinedWord(table, i) {
  const version = table.joined_version[i];
  return table.joined_stage[i] + "B" + table.joined_microbatch[i] + (version ? "@" + version : "");
}

// Format a number with some significant digits, without trailing zeros.
function number(value, digits = 4) {
  if (value === 0) return "0";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(places, 12) });
}

function timeUnit(size) {
  if (size >= 1 || size === 0) return ["s", 1];
  if (size >= 1e-3) return ["ms", 1e-3];
  return size >= 1e-6 ? ["µs", 1e-6] : ["ns", 1e-9];
}

function seconds(value, digits = 6) {
  const [unit, scale] = timeUnit(Math.abs(value));
  return number(value / scale, digits) + " " + unit;
}

function amount(value, inBytes) {
  if (!inBytes) return number(value) + " A";
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) >= scale) return number(value / scale) + " " + unit;
  }
  return number(value) + " B";
}

// Return the tooltip of a box or a transfer: a heading and pairs of a name and a value.
function details(panel, table, i, slot) {
  const op = table.op[i];
  const microbatch = table.microbatch[i];
  const pairs = [["operation", data.ops[op].words], ["stage", table.stage[i]], ["slot", panel.slots[slot].slot]];
  if (op >= OP.SEND_F && op <= OP.RECV_B) {
    pairs.push([op % 2 ? "to stage" : "from stage", table.peer[i] + (table.replica[i] > 0 ? "." + table.replica[i] : "")]);
  }
  if (microbatch >= 0) {
    pairs.push(["micro-batch", microbatch], ["mini-batch", Math.floor(microbatch / panel.microbatches)]);
  }
  pairs.push(["weight version", table.version[i]]);
  if (op === OP.FB) {
    pairs.push(["overlaps", joinedWord(table, i)], ["its stage", table.joined_stage[i]]);
    pairs.push(["its micro-batch", table.joined_microbatch[i]]);
  }
  pairs.push(["start", seconds(table.start[i])], ["end", seconds(table.end[i])]);
  pairs.push(["duration", seconds(table.end[i] - table.start[i])]);
  return { word: wordOf(table, i), pairs };
}
