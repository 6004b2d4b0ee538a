// What is chosen, and the question that follows from it.

const FACTORS = {
  bandwidth: [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256],
  latency: [0.015625, 0.0625, 0.125, 0.25, 0.5, 1, 2, 4],
  speed: [0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8],
};
const FIELDS = { bandwidth: "network.bandwidth", latency: "network.latency", speed: "device.speed" };
const PLAIN = { device: ["device", ""], link: ["network.link", ""], uplink: ["cluster.bandwidth", ""], precision: ["precision", "fp32"], gradients: ["gradients", "fp32"], accumulation: ["accumulation", "1"], bucket: ["bucket_cap", ""] };
const LAYOUT = { tp: "1", pp: "1", zero: "3", micro: "1", recompute: "none" };

const ladders = {};

function powers(first, last, withThirds = true) {
  const found = [];
  for (let size = first; size <= last; size *= 2) {
    found.push(size);
    if (withThirds && Number.isInteger(size * 1.5) && size * 1.5 <= last) found.push(size * 1.5);
  }
  return found.sort((a, b) => a - b);
}

function setLadder(id, values, chosen) {
  const slider = byId(id);
  const sorted = [...new Set(values)];
  ladders[id] = sorted;
  slider.min = 0;
  slider.max = sorted.length - 1;
  slider.step = 1;
  moveTo(id, chosen);
}

// The nearest place of a slider; a number that was typed stays what it is.
function moveTo(id, chosen) {
  const values = ladders[id];
  const exact = values.indexOf(chosen);
  const distance = (value) => Math.abs(Math.log(value / chosen));
  const near = values.reduce((best, value, i) => (distance(value) < distance(values[best]) ? i : best), 0);
  byId(id).value = exact >= 0 ? exact : near;
}

function profileOf(state) {
  return data.catalogue.profiles.find((profile) => profile.name === state.profile) ?? data.catalogue.profiles[0];
}

function workloadOf(state) {
  const { workloads } = profileOf(state);
  return workloads.find((workload) => workload.name === state.workload) ?? workloads[0];
}

// What a page starts with, for a machine and a workload.
function fresh(profileName, workloadName, scaling = "weak") {
  const profile = profileOf({ profile: profileName });
  const workload = workloadOf({ profile: profile.name, workload: workloadName });
  const state = { profile: profile.name, workload: workload.name, scaling, factors: { bandwidth: 1, latency: 1, speed: 1 }, plain: {}, cluster: "", layout: { ...LAYOUT }, others: {} };
  for (const [id, [, usual]] of Object.entries(PLAIN)) state.plain[id] = usual;
  if (profile.kind === "inferred") return { ...state, devices: 8, batch: 64 };
  const { batches } = workload;
  const batch = scaling === "strong" ? batches.at(-1) : batches[Math.floor(batches.length / 2)];
  if (profile.bandwidth_bytes_per_s) return { ...state, devices: 8, batch };
  const [cluster] = data.catalogue.clusters; // where one rank was measured, nothing else is known of links
  return { ...state, devices: cluster ? Math.min(8, cluster.devices) : 1, batch, cluster: cluster?.name ?? "" };
}

function questionOf(state, known) {
  const asked = { profile: state.profile, workload: state.workload, batch: state.batch, ...known };
  if (profileOf(state).kind === "inferred") {
    const { tp, pp, zero, micro, recompute } = state.layout;
    const dp = state.devices / (tp * pp);
    if (!Number.isInteger(dp)) throw new Error(`tensor parallel x pipeline stages (${tp * pp}) must divide the devices, got ${state.devices}`);
    return { ...asked, layout: `dp=${dp} tp=${tp} pp=${pp} zero=${zero} micro_batch=${micro} recompute=${recompute}` };
  }
  const changes = { ...state.others };
  for (const [id, field] of Object.entries(FIELDS)) if (state.factors[id] !== 1) changes[field] = factor(state.factors[id]);
  for (const [id, [field, usual]] of Object.entries(PLAIN)) if (state.plain[id] !== usual) changes[field] = state.plain[id];
  const cluster = state.cluster ? { cluster: state.cluster } : {};
  return { ...asked, ...cluster, layout: `dp=${state.devices}`, scaling: state.scaling, changes };
}

// The other way round: a question from the address or a file. Changes without a control are kept.
function stateOf(question) {
  const state = fresh(question.profile, question.workload, question.scaling ?? "weak");
  if (question.batch) state.batch = question.batch;
  const found = Object.fromEntries(question.layout.split(" ").map((word) => word.split("=")));
  const { dp = "1", tp = "1", pp = "1", zero = "0", micro_batch: micro = "1", recompute = "none" } = found;
  state.layout = { tp, pp, zero, micro, recompute };
  state.devices = dp * tp * pp;
  state.cluster = question.cluster ?? "";
  for (const [field, value] of Object.entries(question.changes ?? {})) {
    const slider = Object.keys(FIELDS).find((id) => FIELDS[id] === field);
    const plain = Object.keys(PLAIN).find((id) => PLAIN[id][0] === field);
    if (slider && /^[\d.]+x$/.test(value)) state.factors[slider] = Number(value.slice(0, -1));
    else if (plain) state.plain[plain] = value;
    else state.others[field] = value;
  }
  return state;
}

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text, disabled = false]) => {
    const option = html("option", { value }, text);
    option.disabled = disabled;
    return option;
  }));
  select.value = chosen;
}

function showMachine(state) {
  const [profile, workload] = [profileOf(state), workloadOf(state)];
  const isLayout = profile.kind === "inferred";
  document.querySelectorAll(".step-only").forEach((part) => { part.hidden = isLayout; });
  document.querySelectorAll(".layout-only").forEach((part) => { part.hidden = !isLayout; });
  options(byId("profile"), data.catalogue.profiles.map(({ name }) => [name, name]), profile.name);
  options(byId("workload"), profile.workloads.map(({ name }) => [name, name]), workload.name);
  byId("workload-word").textContent = isLayout ? "Model" : "Workload";
  byId("about").textContent = `${workload.name} on ${profile.device}, predicted on this machine, offline`;
  const byScaling = state.scaling === "strong" ? "Batch of all devices" : "Batch of each device";
  byId("batch-word").textContent = isLayout ? "Global batch (sequences)" : byScaling;
  const units = ["ms", "s", isLayout ? "tokens/s" : "samples/s"];
  const unit = byId("logged-unit").value;
  options(byId("logged-unit"), units.map((name) => [name, name]), units.includes(unit) ? unit : "ms");
  byId(state.scaling).checked = true;
  if (isLayout) showLayout(state, workload);
  else showStep(state, profile, workload);
  const most = isLayout ? 16384 : mostDevices(state, profile);
  setLadder("devices", powers(1, most, !isLayout && state.scaling === "weak"), state.devices);
  setLadder("batch", batchLadder(state, workload, isLayout), state.batch);
}

// Where devices stand: in a cluster that was chosen, or among nodes that the machine knows.
function clusterOf(state, profile) {
  return data.catalogue.clusters.find(({ name }) => name === state.cluster) ?? profile.nodes;
}

// Where one rank was measured, nothing is known of links but what a cluster file says.
function mostDevices(state, profile) {
  return clusterOf(state, profile)?.devices ?? (profile.bandwidth_bytes_per_s ? 16384 : 1);
}

// What belongs to the machine, or is the user's of this machine, starts again with another one.
function showKnown(state, question = {}) {
  const { capacity_bytes: given, logged } = question;
  const capacity = given ?? memoryOf(state);
  byId("capacity").value = capacity ? Number((capacity / 2 ** 30).toPrecision(6)) : "";
  byId("capacity-hint").textContent = !given && capacity ? "By the data sheet." : "";
  byId("logged").value = logged?.value ?? "";
  if (logged) byId("logged-unit").value = logged.unit;
}

function memoryOf(state) {
  const device = data.catalogue.devices.find(({ id }) => id === state.plain.device);
  return (device ?? profileOf(state)).memory_bytes;
}

function batchLadder(state, workload, isLayout) {
  if (isLayout) return powers(8, 16384, false);
  const most = workload.batches.at(-1);
  if (state.scaling === "strong") return powers(1, 65536);
  return [...new Set([...powers(1, 4 * most), ...workload.batches])].sort((a, b) => a - b);
}

function showStep(state, profile, workload) {
  const known = profile.bandwidth_bytes_per_s;
  for (const id of Object.keys(FACTORS)) {
    setLadder(id, FACTORS[id], state.factors[id]);
    byId(id).disabled = id !== "speed" && !known;
  }
  byId("link-hint").textContent = known ? "" : "One device was measured: nothing is known of its network. Choose another machine, serve with --cluster '8 pcie4-x16', or calibrate with --nproc 2.";
  showHardware(state, profile, workload);
  const refused = Object.entries(workload.refused);
  const traced = workload.precision ? `${workload.precision}, as traced` : "as measured";
  options(byId("precision"), ["fp32", "bf16", "fp16"].filter((name) => name === "fp32" || name !== workload.precision).map((name) => [name, name === "fp32" ? traced : name, name in workload.refused]), state.plain.precision);
  byId("precision-hint").textContent = workload.precision ? "Another precision: trace the model in it (perfmodel trace --precision)." : refused.length ? `${refused.map(([name]) => name).join(", ")}: ${refused[0][1]}` : "";
  for (const id of Object.keys(PLAIN)) byId(id).value = state.plain[id];
}

// Hardware that is not here: a device and a link of the catalogue, cluster files, rates between nodes.
function showHardware(state, profile, workload) {
  const { clusters, devices, links } = data.catalogue;
  options(byId("device"), [["", "as calibrated"], ...devices.map(({ id, name }) => [id, name])], state.plain.device);
  byId("device").disabled = workload.no_devices !== "";
  byId("device-hint").textContent = workload.no_devices && `Another device: ${workload.no_devices}.`;
  options(byId("link"), [["", "as measured"], ...links.map(({ id, bytes_per_s: each }) => [id, `${id}: ${rate(each)}`])], state.plain.link);
  byId("link").disabled = !profile.bandwidth_bytes_per_s;
  options(byId("cluster"), [["", profile.nodes?.name ?? "not named"], ...clusters.map(({ name, devices: most }) => [name, `${name} (${count(most)})`])], state.cluster);
  byId("cluster-row").hidden = clusters.length === 0 && !profile.nodes;
  const chosen = clusterOf(state, profile);
  byId("uplink-row").hidden = !chosen;
  if (!chosen) return;
  const tiers = chosen.tiers.filter(({ name }) => name !== "node" || !profile.bandwidth_bytes_per_s);
  byId("link-hint").textContent = `${chosen.name}. Each link, assumed: ${tiers.map(({ name, bytes_per_s: each }) => `${name} ${rate(each)}`).join(", ")}.${tiers.length < chosen.tiers.length ? " Link, bandwidth and latency are those inside a node." : ""}`;
  const rates = tiers.flatMap(({ name }) => ["100Gb/s", "200Gb/s", "400Gb/s", "800Gb/s"].map((each) => `${name}:${each}`));
  options(byId("uplink"), [["", "as it is"], ...rates.map((text) => [text, text.replace(":", ": ")])], state.plain.uplink);
}

function showLayout(state, workload) {
  const allowed = (numbers, divides) => numbers.map((n) => [String(n), String(n), divides % n !== 0]);
  options(byId("tp"), allowed([1, 2, 4, 8, 16], workload.heads), state.layout.tp);
  options(byId("pp"), allowed([1, 2, 4, 5, 8, 10, 16, 20, 32], workload.layers), state.layout.pp);
  if (state.layout.pp !== "1" && state.layout.zero > "1") state.layout.zero = "1"; // a pipeline keeps its gradients
  options(byId("zero"), ["0", "1", "2", "3"].map((stage) => [stage, stage, state.layout.pp !== "1" && stage > "1"]), state.layout.zero);
  for (const id of ["micro", "recompute"]) byId(id).value = state.layout[id];
}

function showNumbers(state) {
  const profile = profileOf(state);
  for (const id of ["devices", "batch"]) {
    if (document.activeElement !== byId(`${id}-number`)) byId(`${id}-number`).value = state[id];
    byId(id).setAttribute("aria-valuetext", count(state[id]));
  }
  const link = data.catalogue.links.find(({ id }) => id === state.plain.link);
  const base = { bandwidth: link?.bytes_per_s ?? profile.bandwidth_bytes_per_s, latency: profile.latency_s, speed: null };
  for (const id of Object.keys(FACTORS)) {
    const times = state.factors[id];
    const absolute = base[id] && (id === "bandwidth" ? rate(times * base[id]) : duration(times * base[id]));
    const isKnown = id === "speed" || base[id];
    const moved = !isKnown ? "not known" : [absolute, times === 1 ? (id === "bandwidth" && link ? "assumed" : "as measured") : `${Number(times.toPrecision(3))}x`].filter(Boolean).join(", ");
    const text = state.others[FIELDS[id]] ?? moved;
    byId(`${id}-text`).textContent = text;
    byId(id).setAttribute("aria-valuetext", text);
  }
}
