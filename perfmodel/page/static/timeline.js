// One simulated step: a lane for each stream of the slowest rank, or of each pipeline stage.

const LANE = { height: 26, gap: 6, axis: 24, most: 16 };

function ticks(most, unitSize, wanted) {
  const rough = most / unitSize / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough) * unitSize;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

function drawTimeline(answer) {
  const place = byId("timeline");
  const lanes = answer.timeline.slice(0, LANE.most);
  const narrow = widths.timeline < 520;
  const left = narrow ? 0 : Math.max(...lanes.map((lane) => lane.name.length)) * 6.6 + 14;
  const above = narrow ? 15 : 0;
  const each = LANE.height + LANE.gap + above;
  const height = lanes.length * each + LANE.axis;
  const { image, width } = picture(place, height, `One step of ${duration(answer.timeline_step_s)} in ${lanes.length} lanes`);
  const x = (seconds) => left + (seconds / answer.timeline_step_s) * (width - left - 1);
  lanes.forEach((lane, i) => {
    const y = i * each + above;
    image.append(svg("rect", { class: "lane", x: left, y, width: width - left, height: LANE.height, rx: 3 }));
    image.append(svg("text", { x: narrow ? 0 : left - 10, y: narrow ? y - 4 : y + 17, "text-anchor": narrow ? "start" : "end" }, lane.name));
    for (const span of lane.spans) image.append(drawSpan(span, { x, y }));
  });
  drawTime(image, answer.timeline_step_s, { x, height, width });
  place.replaceChildren(image);
  const causes = [...new Set(lanes.flatMap((lane) => lane.spans.map((span) => span.cause)))];
  place.append(html("ul", { class: "keys" }, ...causes.map((cause) => key(cause, words(cause)))));
  const leftOut = answer.timeline.length - lanes.length;
  const rest = `${duration(answer.timeline_step_s)} at nominal parameters, the slowest rank${answer.timeline_without_s > 0 ? `, without ${duration(answer.timeline_without_s)} of equal micro-batches` : ""}${leftOut > 0 ? `; ${leftOut} more lanes` : ""}`;
  byId("timeline-readout").dataset.rest = rest;
  byId("timeline-readout").textContent = rest;
}

function drawSpan(span, { x, y }) {
  const wide = Math.max(0.75, x(span.end_s) - x(span.start_s));
  const rect = coloured(svg("rect", { class: "span", x: x(span.start_s), y, width: wide, height: LANE.height, rx: 2 }), span.cause);
  const text = `${words(span.cause)}, ${span.name}: ${duration(span.end_s - span.start_s)} from ${duration(span.start_s)}`;
  rect.append(svg("title", {}, text));
  const readout = byId("timeline-readout");
  rect.addEventListener("pointerenter", () => { readout.textContent = text; });
  rect.addEventListener("pointerleave", () => { readout.textContent = readout.dataset.rest; });
  return rect;
}

function drawTime(image, most, { x, height, width }) {
  const [unit, size] = durationUnit(most);
  for (const time of ticks(most, size, width < 520 ? 4 : 8)) {
    const anchor = time === 0 ? "start" : x(time) > width - 30 ? "end" : "middle";
    image.append(svg("text", { x: x(time), y: height - 5, "text-anchor": anchor }, `${Number((time / size).toPrecision(6))}${time ? "" : ` ${unit}`}`));
  }
}
