// Speed-up, or tokens per second, over devices; both axes in powers of two.

const CURVE = { top: 14, right: 18, bottom: 34, left: 54, height: 300 };

function curveScales(points, width) {
  const values = points.flatMap((point) => [point.value.p5, point.value.p95, point.ideal]);
  const [low, high] = [Math.min(...values), Math.max(...values)].map(Math.log2);
  const span = Math.max(high - low, 1);
  const first = Math.log2(points[0].devices);
  const last = Math.max(Math.log2(points.at(-1).devices), first + 1);
  const [inner, tall] = [width - CURVE.left - CURVE.right, CURVE.height - CURVE.top - CURVE.bottom];
  return {
    x: (devices) => CURVE.left + ((Math.log2(devices) - first) / (last - first)) * inner,
    y: (value) => CURVE.top + (1 - (Math.log2(value) - low) / span) * tall,
    low, high, span,
  };
}

function axisValue(value) {
  if (Number.isInteger(value) && value <= 2048) return count(value);
  const [prefix, size] = scaleOf(value);
  const text = number(value / size);
  return `${text.includes(".") ? text.replace(/\.?0+$/, "") : text}${prefix && ` ${prefix}`}`;
}

function drawAxes(image, points, scales, width) {
  const every = Math.ceil(scales.span / 6);
  for (let power = Math.ceil(scales.low - 1e-9); power <= scales.high + 1e-9; power += every) {
    const y = scales.y(2 ** power);
    image.append(svg("line", { class: "grid", x1: CURVE.left, x2: width - CURVE.right, y1: y, y2: y }));
    image.append(svg("text", { x: CURVE.left - 8, y: y + 4, "text-anchor": "end" }, axisValue(2 ** power)));
  }
  let free = -Infinity;
  for (const { devices } of points.filter((point) => Number.isInteger(Math.log2(point.devices / points[0].devices)))) {
    const [x, text] = [scales.x(devices), count(devices)];
    if (x - 4 * text.length < free) continue;
    free = x + 4 * text.length + 6;
    image.append(svg("text", { x, y: CURVE.height - 16, "text-anchor": "middle" }, text));
  }
  image.append(svg("text", { x: width - CURVE.right, y: CURVE.height - 1, "text-anchor": "end" }, "devices"));
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function pointWords(point, answer) {
  const { value, range, unit } = answer.speedup ? ranged(point.value) : rangedCount(point.value, "tokens/s");
  return `${count(point.devices)} devices: ${value} ${unit} ${range}`.replace("  ", " ");
}

function drawCurve(answer, devices, choose) {
  const [place, points] = [byId("curve"), answer.curve];
  byId("curve-title").textContent = answer.speedup ? "Speed-up over devices" : "Tokens per second over devices";
  const label = `${answer.speedup ? "Speed-up" : "Tokens per second"} from ${points[0].devices} to ${points.at(-1).devices} devices; the table below has its numbers`;
  const { image, width } = picture(place, CURVE.height, label);
  const scales = curveScales(points, width);
  drawAxes(image, points, scales, width);
  const at = (read) => points.map((point) => [scales.x(point.devices), scales.y(read(point))]);
  const band = [...at((p) => p.value.p95), ...at((p) => p.value.p5).reverse()];
  image.append(svg("path", { class: "ideal", d: path(at((p) => p.ideal)) }));
  image.append(svg("path", { class: "band", d: `${path(band)}Z` }));
  image.append(svg("path", { class: "curve", d: path(at((p) => p.value.nominal)) }));
  for (const point of points) drawPoint(image, point, scales, { answer, devices, choose });
  const end = points.at(-1);
  image.append(svg("text", { x: scales.x(end.devices), y: scales.y(end.ideal) - 5, "text-anchor": "end" }, "nothing lost"));
  place.replaceChildren(image);
  const chosen = points.find((point) => point.devices === devices);
  const rest = chosen ? `${pointWords(chosen, answer)}; band: 90 % of outcomes should lie inside` : "";
  byId("curve-readout").dataset.rest = rest;
  byId("curve-readout").textContent = rest;
  byId("curve-table").replaceChildren(curveTable(answer));
}

function drawPoint(image, point, scales, { answer, devices, choose }) {
  const [x, y] = [scales.x(point.devices), scales.y(point.value.nominal)];
  const isChosen = point.devices === devices;
  if (isChosen) image.append(svg("line", { class: "whisker", x1: x, x2: x, y1: scales.y(point.value.p5), y2: scales.y(point.value.p95) }));
  image.append(svg("circle", { class: isChosen ? "chosen" : "dot", cx: x, cy: y, r: isChosen ? 6.5 : 3 }));
  if (isChosen) {
    const right = x < 120;
    const { value, unit } = answer.speedup ? ranged(point.value) : rangedCount(point.value, "");
    const text = `${value} ${unit}`.trim();
    image.append(svg("text", { class: "strong", x: right ? x + 12 : x - 11, y: right ? y + 16 : y - 9, "text-anchor": right ? "start" : "end" }, text));
  }
  const hit = svg("circle", { class: "hit", cx: x, cy: y, r: 14, "data-devices": point.devices });
  const readout = byId("curve-readout");
  hit.addEventListener("pointerenter", () => { readout.textContent = `${pointWords(point, answer)}; click to choose`; });
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
