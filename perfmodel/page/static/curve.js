// Speed-up, tokens per second, or efficiency over devices; axes in powers of two, or linear.

const CURVE = { top: 14, right: 18, bottom: 34, left: 54, height: 300 };

function isEfficiency() {
  return byId("curve-measure").value === "efficiency";
}

function isLinear() {
  return byId("curve-axes").value === "linear";
}

// The points as they are drawn. No device is faster than alone: the band of a speed-up, and of any efficiency,
// ends at the ideal. The draws may pass it, where runs of one setting differ; the table keeps them.
// Linear axes end at four times the devices that are chosen: what lies far left could not be seen.
function shownPoints(answer, chosen) {
  const last = isLinear() ? Math.max(4 * chosen, 8) : Infinity;
  return answer.curve.filter(({ devices }, i) => devices <= last || i < 2).map(({ devices, value, ideal }) => {
    const unit = isEfficiency() ? ideal / 100 : 1;
    const most = answer.speedup || isEfficiency() ? Math.max(ideal, value.nominal) : Infinity;
    const [p5, nominal, p95] = [value.p5, value.nominal, value.p95].map((each) => Math.min(each, most) / unit);
    return { devices, ideal: ideal / unit, value: { p5, nominal, p95 } };
  });
}

function curveScales(points, width) {
  const values = points.flatMap((point) => [point.value.p5, point.value.p95, point.ideal]);
  const [inner, tall] = [width - CURVE.left - CURVE.right, CURVE.height - CURVE.top - CURVE.bottom];
  const last = Math.max(points.at(-1).devices, 2 * points[0].devices);
  const across = axis(isLinear() ? 0 : points[0].devices, last, isLinear());
  const up = axis(isLinear() || isEfficiency() ? 0 : Math.min(...values), Math.max(...values), isLinear() || isEfficiency());
  return {
    x: (devices) => CURVE.left + across.at(devices) * inner,
    y: (value) => CURVE.top + (1 - up.at(value)) * tall,
    xTicks: isLinear() ? across.ticks : points.map(({ devices }) => devices).filter((devices) => Number.isInteger(Math.log2(devices / points[0].devices))),
    yTicks: up.ticks,
  };
}

// Where a value lies between both ends, 0 to 1, and at most seven round values.
function axis(low, high, isEven) {
  if (isEven) {
    const step = 10 ** Math.floor(Math.log10(high / 2));
    const every = [1, 2, 5].map((times) => times * step).find((size) => high / size <= 6) ?? 10 * step;
    return { at: (value) => (value - low) / (high - low), ticks: Array.from({ length: Math.floor(high / every) + 1 }, (_, i) => i * every) };
  }
  const first = Math.log2(low);
  const span = Math.max(Math.log2(high) - first, 1);
  const every = Math.ceil(span / 6);
  const powers = Array.from({ length: Math.floor(span / every) + 1 }, (_, i) => 2 ** (Math.ceil(first - 1e-9) + i * every));
  return { at: (value) => (Math.log2(value) - first) / span, ticks: powers.filter((value) => value <= high * 1.0001) };
}

function axisValue(value) {
  if (Number.isInteger(value) && value <= 2048) return count(value);
  const [prefix, size] = scaleOf(value);
  const text = number(value / size);
  return `${text.includes(".") ? text.replace(/\.?0+$/, "") : text}${prefix && ` ${prefix}`}`;
}

function drawAxes(image, scales, width) {
  for (const value of scales.yTicks) {
    const y = scales.y(value);
    image.append(svg("line", { class: "grid", x1: CURVE.left, x2: width - CURVE.right, y1: y, y2: y }));
    image.append(svg("text", { x: CURVE.left - 8, y: y + 4, "text-anchor": "end" }, `${axisValue(value)}${isEfficiency() ? " %" : ""}`));
  }
  let free = -Infinity;
  for (const devices of scales.xTicks) {
    const [x, text] = [scales.x(devices), count(devices)];
    if (x - 4 * text.length < free) continue;
    free = x + 4 * text.length + 6;
    image.append(svg("text", { x, y: CURVE.height - 16, "text-anchor": "middle" }, text));
  }
  image.append(svg("text", { x: width - CURVE.right, y: CURVE.height - 1, "text-anchor": "end" }, "devices"));
}

// Devices beyond which nothing was measured, if the curve goes there.
function measuredEnd(points) {
  const { measured_devices: most } = profileOf(state);
  return most && most < points.at(-1).devices ? most : null;
}

function drawMeasuredEnd(image, points, scales, width) {
  const most = measuredEnd(points);
  if (!most) return;
  const [x, top] = [scales.x(Math.max(most, points[0].devices)), CURVE.top];
  const bottom = CURVE.height - CURVE.bottom;
  image.append(svg("rect", { class: "beyond", x, y: top, width: width - CURVE.right - x, height: bottom - top }));
  image.append(svg("line", { class: "measured-end", x1: x, x2: x, y1: top, y2: bottom }));
  image.append(svg("text", { x: x + 5, y: isEfficiency() ? bottom - 6 : top + 14 }, `measured up to ${count(most)}`));
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function pointWords(point, answer) {
  const { value, range, unit } = isEfficiency() ? ranged(point.value, point.ideal / 100, "%") : answer.speedup ? ranged(point.value) : rangedCount(point.value, "tokens/s");
  return `${count(point.devices)} ${point.devices === 1 ? "device" : "devices"}: ${value} ${unit} ${range}`.replace("  ", " ");
}

function drawCurve(answer, devices, choose) {
  const [place, raw, points] = [byId("curve"), answer.curve, shownPoints(answer, devices)];
  const usual = answer.speedup ? "Speed-up" : "Tokens per second";
  byId("curve-measure").options[0].textContent = usual;
  const name = isEfficiency() ? "Efficiency" : usual;
  byId("curve-title").textContent = `${name} over devices`;
  byId("curve-views").hidden = points.length === 1;
  const label = `${name} from ${points[0].devices} to ${points.at(-1).devices} devices; the table below has its numbers`;
  byId("curve-table").replaceChildren(curveTable(answer));
  if (points.length === 1) {
    byId("curve-readout").textContent = "One device: nothing is known of its network. Choose a machine with links, or serve with --cluster '8 pcie4-x16'.";
    place.replaceChildren();
    return;
  }
  const { image, width } = picture(place, CURVE.height, label);
  const scales = curveScales(points, width);
  drawMeasuredEnd(image, points, scales, width);
  drawAxes(image, scales, width);
  const at = (read) => points.map((point) => [scales.x(point.devices), scales.y(read(point))]);
  const band = [...at((p) => p.value.p95), ...at((p) => p.value.p5).reverse()];
  image.append(svg("path", { class: "ideal", d: path(at((p) => p.ideal)) }));
  image.append(svg("path", { class: "band", d: `${path(band)}Z` }));
  image.append(svg("path", { class: "curve", d: path(at((p) => p.value.nominal)) }));
  points.forEach((point, i) => { drawPoint(image, point, scales, { answer, devices, choose, words: pointWords(isEfficiency() ? point : raw[i], answer) }); });
  const end = points.at(-1);
  image.append(svg("text", { x: scales.x(end.devices), y: scales.y(end.ideal) - 5, "text-anchor": "end" }, "nothing lost"));
  place.replaceChildren(image);
  const chosen = (isEfficiency() ? points : raw).find((point) => point.devices === devices);
  const rest = chosen ? `${pointWords(chosen, answer)}; band: 90 % of outcomes should lie inside${beyondWords(points)}` : "";
  byId("curve-readout").dataset.rest = rest;
  byId("curve-readout").textContent = rest;
}

// What links are taken to be where none were measured.
function beyondWords(points) {
  const profile = profileOf(state);
  if (!measuredEnd(points) || profile.kind === "inferred") return "";
  return `. Shaded: nothing was measured, links assumed: ${clusterOf(state, profile)?.name ?? "what it rests on says which"}`;
}

function drawPoint(image, point, scales, { answer, devices, choose, words }) {
  const [x, y] = [scales.x(point.devices), scales.y(point.value.nominal)];
  const isChosen = point.devices === devices;
  if (isChosen) image.append(svg("line", { class: "whisker", x1: x, x2: x, y1: scales.y(point.value.p5), y2: scales.y(point.value.p95) }));
  image.append(svg("circle", { class: isChosen ? "chosen" : "dot", cx: x, cy: y, r: isChosen ? 6.5 : 3 }));
  if (isChosen) {
    const right = x < 120 || (isEfficiency() && x < Number(image.getAttribute("width")) - 90);
    const { value, unit } = isEfficiency() ? ranged(point.value, 1, "%") : answer.speedup ? ranged(point.value) : rangedCount(point.value, "");
    const text = `${value} ${unit}`.trim();
    image.append(svg("text", { class: "strong", x: right ? x + 12 : x - 11, y: right && !isEfficiency() ? y + 16 : y - 9, "text-anchor": right ? "start" : "end" }, text));
  }
  const hit = svg("circle", { class: "hit", cx: x, cy: y, r: 14, "data-devices": point.devices });
  const readout = byId("curve-readout");
  hit.addEventListener("pointerenter", () => { readout.textContent = `${words}; click to choose`; });
  hit.addEventListener("pointerleave", () => { readout.textContent = readout.dataset.rest; });
  hit.addEventListener("click", () => choose(point.devices));
  image.append(hit);
}

function curveTable(answer) {
  const rows = answer.curve.map((point) => {
    const { value, unit, range } = answer.speedup ? ranged(point.value) : rangedCount(point.value, "tokens/s");
    return [count(point.devices), `${value} ${unit}`.trim(), range, percent(point.value.nominal / point.ideal)];
  });
  return table(["Devices", answer.speedup ? "Speed-up" : "Throughput", "90 % interval", "Of nothing lost"], rows);
}
