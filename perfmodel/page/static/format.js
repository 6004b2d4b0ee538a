// Numbers as text, by the same rules as perfmodel/report/__init__.py and units.py.

const UNITS = [["d", 86400, 2], ["h", 3600, 2], ["min", 60, 2], ["s", 1, 1], ["ms", 1e-3, 1], ["us", 1e-6, 1], ["ns", 1e-9, 0]];

function number(value, like = value) {
  const size = Math.abs(like);
  const digits = size < 1 ? 1 : Math.floor(Math.log10(size)) + 1;
  const place = 10 ** (digits - 3);
  const rounded = digits > 3 ? Math.round(value / place) * place : value;
  const text = rounded.toFixed(Math.max(0, 3 - digits));
  return /^-[0.]*$/.test(text) ? text.slice(1) : text;
}

function grouped(text) {
  const [whole, part] = text.split(".");
  const spaced = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return part === undefined ? spaced : `${spaced}.${part}`;
}

function count(value) {
  return grouped(String(value));
}

function percent(fraction) {
  const digits = Math.abs(fraction) < 1 ? 1 : 0;
  return `${(100 * fraction).toFixed(digits)} %`;
}

function durationUnit(seconds) {
  return UNITS.find(([, size, least]) => Math.abs(seconds) >= size * least) ?? UNITS.at(-1);
}

function duration(seconds, like = seconds) {
  if (seconds === 0) return "0 s";
  const [unit, size] = durationUnit(like);
  return `${number(seconds / size, like / size)} ${unit}`;
}

function bytes(size) {
  for (const [prefix, power] of [["Ti", 40], ["Gi", 30], ["Mi", 20], ["Ki", 10]]) {
    if (size >= 2 ** power) return `${number(size / 2 ** power)} ${prefix}B`;
  }
  return `${number(size)} B`;
}

function rate(bytesPerSecond) {
  for (const [prefix, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (bytesPerSecond >= size) return `${number(bytesPerSecond / size)} ${prefix}B/s`;
  }
  return `${number(bytesPerSecond)} B/s`;
}

function scaleOf(value) {
  for (const entry of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= entry[1]) return entry;
  }
  return ["", 1];
}

// An interval as its middle and its range, in one unit.
function ranged(interval, scale = 1, unit = "") {
  const like = interval.nominal / scale;
  const [low, high] = [interval.p5, interval.p95].map((value) => number(value / scale, like));
  return { value: number(like), unit, range: `[${low}-${high}]` };
}

function rangedDuration(interval) {
  const [unit, size] = durationUnit(interval.nominal || interval.p95);
  return ranged(interval, size, unit);
}

function rangedCount(interval, unit) {
  const [prefix, size] = scaleOf(Math.max(interval.nominal, 1));
  return ranged(interval, size, `${prefix ? `${prefix} ` : ""}${unit}`.trim());
}

function factor(value) {
  return `${value}x`;
}

function words(name) {
  return name.replaceAll("_", " ");
}
