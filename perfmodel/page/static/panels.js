// Figures, bars, memory and what they rest on.

function figure(id, title, { value, unit = "", range }, note = "") {
  const shown = html("div", { class: "value", id: `${id}-value` }, value);
  if (unit) shown.append(html("small", {}, ` ${unit}`));
  return html("div", { class: "figure", id }, html("h2", {}, title), shown, html("div", { class: "range" }, `${range}${note && ` ${note}`}`));
}

function percentRange(interval) {
  const [low, high] = [interval.p5, interval.p95].map((value) => (100 * value).toFixed(1));
  return { value: (100 * interval.nominal).toFixed(1), unit: "%", range: `[${low}-${high}]` };
}

function drawFigures(answer) {
  const found = [];
  if (answer.speedup) found.push(figure("speedup", "Speed-up", ranged(answer.speedup)));
  found.push(figure("step", "Step", rangedDuration(answer.step_s)));
  found.push(figure("throughput", "Throughput", rangedCount(answer.throughput, answer.throughput_unit)));
  const title = answer.efficiency_name === "MFU" ? "MFU" : "Scaling efficiency";
  found.push(figure("efficiency", title, percentRange(answer.efficiency)));
  if (answer.contrast) {
    const shown = answer.contrast.throughput_ratio.nominal.toFixed(2);
    const sure = Math.round(100 * answer.contrast.probability_faster);
    found.push(figure("contrast", "Against no change", { ...ranged(answer.contrast.throughput_ratio), unit: "x as fast" }, shown === "1.00" ? "" : `faster: ${sure} %`));
  }
  byId("figures").replaceChildren(...found);
  byId("setting").textContent = answer.setting;
}

// A bar of parts, and its key with numbers.
function bar(place, parts, total, { label, text, mark = null }) {
  const { image, width } = picture(place, 30, label);
  image.append(svg("rect", { class: "lane", x: 0, y: 0, width, height: 30, rx: 4 }));
  let from = 0;
  for (const [name, size, colour = name] of parts) {
    const wide = (size / total) * width;
    image.append(coloured(svg("rect", { class: "span", x: from, y: 0, width: Math.max(wide, 0.5), height: 30 }), colour));
    from += wide;
  }
  if (mark !== null) image.append(svg("line", { x1: mark * width, x2: mark * width, y1: -4, y2: 34, stroke: "currentColor", "stroke-width": 2 }));
  const keys = parts.map(([name, size, colour = name]) => key(colour, `${words(name)} `, html("b", {}, text(size))));
  place.replaceChildren(image, html("ul", { class: "keys" }, ...keys));
}

function drawBreakdown(answer) {
  const parts = Object.entries(answer.breakdown_s).filter(([, time]) => time > 0);
  const total = parts.reduce((sum, [, time]) => sum + time, 0);
  const text = (time) => `${duration(time)} (${percent(time / total)})`;
  bar(byId("breakdown"), parts, total, { label: "Parts of the step on its critical path", text });
  const notes = [];
  if (answer.exposed_comm_s?.p95 > 0) notes.push(`Communication that is not hidden: ${Object.values(rangedDuration(answer.exposed_comm_s)).join(" ")}.`);
  if (answer.straggler_s > 0) notes.push(`Waiting for the slowest rank, within these: ${duration(answer.straggler_s)}.`);
  byId("breakdown-note").textContent = notes.join(" ");
}

const MEMORY_COLOURS = ["backward", "all_reduce", "optimizer", "forward", "input", "broadcast", "head", "contention", "dispatch", "bucket"];

function drawMemory(answer) {
  const [place, memory] = [byId("memory"), answer.memory];
  if (!memory) {
    place.replaceChildren(html("p", { class: "note" }, answer.no_memory));
    return;
  }
  const parts = Object.entries(memory.parts_bytes).filter(([, size]) => size > 0).sort(([, a], [, b]) => b - a);
  const total = Math.max(memory.needed_bytes, memory.capacity_bytes);
  const colours = Object.fromEntries(Object.keys(memory.parts_bytes).map((name, i) => [name, MEMORY_COLOURS[i % MEMORY_COLOURS.length]]));
  bar(place, parts.map(([name, size]) => [name, size, colours[name]]), total, {
    label: `${bytes(memory.needed_bytes)} of ${bytes(memory.capacity_bytes)}`, text: bytes, mark: Math.min(1, memory.capacity_bytes / total),
  });
  const kind = { fits: "fits", "does not fit": "misses" }[memory.verdict] ?? "close";
  const text = `${memory.verdict}: needs ${bytes(memory.needed_bytes)} of ${bytes(memory.capacity_bytes)} (odds that it fits: ${Math.round(100 * memory.fit_probability)} %)`;
  place.prepend(html("p", { class: `verdict ${kind}`, id: "memory-verdict" }, text[0].toUpperCase() + text.slice(1)));
}

// A logged speed among the predicted ones.
function drawDiagnosis({ diagnosis, step_s: predicted }) {
  byId("diagnosis").hidden = !diagnosis;
  if (!diagnosis) return;
  const { value, unit, range } = rangedDuration(predicted);
  const share = Math.round(100 * diagnosis.share_slower);
  const isNormal = diagnosis.verdict === "normal";
  byId("verdict").className = `verdict ${isNormal ? "fits" : "misses"}`;
  byId("verdict").textContent = `${diagnosis.verdict[0].toUpperCase()}${diagnosis.verdict.slice(1)}: a step of ${duration(diagnosis.logged_s)}; predicted ${value} ${unit} ${range}, and ${share} % of these runs take longer.`;
  byId("causes").replaceChildren(...diagnosis.causes.map(({ cause, means, odds }) => html("li", {}, html("b", {}, `${percent(odds)} ${cause}`), `: ${means}`)));
  const next = diagnosis.next_name && ` Measure next: ${diagnosis.next_name}.`;
  byId("causes-note").textContent = diagnosis.causes.length ? `Odds by data sheets.${next} This says more:` : "This says more:";
  byId("diagnosis-command").textContent = diagnosis.command;
}

function drawBasis(answer) {
  const terms = Object.entries(answer.evidence).map(([term, evidence]) => `${words(term)} ${evidence}`);
  byId("evidence").textContent = `Evidence: ${terms.join(", ")}.`;
  byId("caveats").replaceChildren(...answer.caveats.map((text) => html("li", {}, text)));
  byId("command").textContent = answer.command;
}
