// From what is moved to what is shown: at most one question under way, and the newest next.

const data = JSON.parse(byId("data").textContent);
let state = first();
let latest = null;
let isAsking = false;
let isWaiting = false;

function first() {
  const asked = firstQuestion();
  return asked ? stateOf(asked) : fresh();
}

// Of the address; of a machine or model that is not offered, nothing holds.
function firstQuestion() {
  try {
    const asked = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    return asked.layout && isOf(asked, { profile: profileOf(asked).name, workload: workloadOf(asked).name }) ? asked : null;
  } catch {
    return null;
  }
}

// What the user knows of this training, beside what is chosen.
function knownHere() {
  const [capacity, logged] = [Number(byId("capacity").value), Number(byId("logged").value)];
  return {
    ...(capacity > 0 ? { capacity_bytes: Math.round(capacity * 2 ** 30) } : {}),
    ...(logged > 0 ? { logged: { value: logged, unit: byId("logged-unit").value } } : {}),
  };
}

function complain(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

function update() {
  showNumbers(state);
  if (isAsking) isWaiting = true;
  else void ask();
}

async function ask() {
  isAsking = true;
  document.body.dataset.asking = "yes";
  const started = performance.now();
  try {
    const question = questionOf(state, knownHere());
    history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(question))}`);
    const answer = await fetched("answer", question);
    if (isOf(question, state)) show(answer, started);
    // The curve takes longer: it waits until nothing newer is asked.
    if (!isWaiting) detail(await fetched("detail", question), question);
  } catch (error) {
    complain(error.message);
  } finally {
    isAsking = false;
    document.body.dataset.answered = String(Number(document.body.dataset.answered ?? 0) + 1);
  }
  if (isWaiting) {
    isWaiting = false;
    await ask();
  } else {
    delete document.body.dataset.asking;
  }
}

// Whether a question is about this machine and this workload.
function isOf(question, { profile, workload }) {
  return question.profile === profile && question.workload === workload;
}

async function fetched(address, question) {
  for (let attempt = 0; ; attempt += 1) {
    const response = await post(address, question);
    if (response.ok) return response.json();
    if (response.status !== 429 || attempt === 5) throw new Error((await response.json()).error);
    await new Promise((resolve) => { setTimeout(resolve, 200 * (attempt + 1)); });
  }
}

async function post(address, question) {
  try {
    return await fetch(address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) });
  } catch {
    throw new Error("perfmodel serve does not answer any more: start it again.");
  }
}

function show(answer, started) {
  latest = { curve: latest?.curve, diagnosis: latest?.diagnosis, ...answer };
  complain("");
  document.body.classList.add("waiting");
  drawAnswer();
  const spent = performance.now() - started;
  document.body.dataset.updateMs = spent.toFixed(1);
  byId("footer").textContent = `perfmodel ${data.catalogue.version}; answered and drawn in ${Math.max(1, Math.round(spent))} ms`;
}

function detail(found, question) {
  if (!isOf(question, state)) return;
  latest = { ...latest, ...found };
  document.body.classList.remove("waiting");
  drawDetail();
}

function draw() {
  drawAnswer();
  drawDetail();
}

function drawDetail() {
  if (!latest.curve) return;
  drawCurve(latest, state.devices, (devices) => { choose("devices", devices); });
  drawDiagnosis(latest);
}

function drawAnswer() {
  measurePlaces();
  drawFigures(latest);
  drawBreakdown(latest);
  drawMemory(latest);
  drawBasis(latest);
}

function choose(id, value) {
  state[id] = value;
  moveTo(id, value);
  update();
}

function listenSliders() {
  for (const id of ["devices", "batch"]) {
    byId(id).addEventListener("input", () => { choose(id, ladders[id][Number(byId(id).value)]); });
    const field = byId(`${id}-number`);
    field.addEventListener("input", () => { if (field.value && field.validity.valid) choose(id, Number(field.value)); });
    field.addEventListener("change", () => { field.value = state[id]; });
  }
  for (const id of Object.keys(FACTORS)) {
    byId(id).addEventListener("input", () => {
      state.factors[id] = ladders[id][Number(byId(id).value)];
      delete state.others[FIELDS[id]];
      update();
    });
  }
}

function listenChoices() {
  for (const id of Object.keys(PLAIN)) {
    byId(id).addEventListener("change", () => {
      state.plain[id] = byId(id).value;
      if (id === "device") showKnown(state);
      update();
    });
  }
  byId("cluster").addEventListener("change", () => { restart({ ...state, cluster: byId("cluster").value, plain: { ...state.plain, uplink: "" } }); });
  for (const id of Object.keys(LAYOUT)) byId(id).addEventListener("change", () => { state.layout[id] = byId(id).value; showLayout(state, workloadOf(state)); update(); });
  for (const id of ["weak", "strong"]) byId(id).addEventListener("change", () => { restart({ ...fresh(state.profile, state.workload, id), devices: state.devices, cluster: state.cluster, factors: state.factors, plain: state.plain, others: state.others }); });
  byId("profile").addEventListener("change", () => { restart(fresh(byId("profile").value)); });
  byId("workload").addEventListener("change", () => { restart({ ...fresh(state.profile, byId("workload").value, state.scaling), devices: state.devices, cluster: state.cluster, factors: state.factors }); });
  byId("reset").addEventListener("click", () => { restart(fresh(state.profile, state.workload), {}); });
  for (const id of ["capacity", "logged", "logged-unit"]) byId(id).addEventListener("input", update);
  for (const id of ["curve-measure", "curve-axes"]) byId(id).addEventListener("change", () => { if (latest?.curve) drawDetail(); });
  byId("controls").addEventListener("submit", (event) => { event.preventDefault(); });
}

function restart(changed, question = null) {
  const [before, isOther] = [state.profile, !isOf(changed, state)];
  if (isOther) document.body.classList.add("stale"); // until the new machine answers
  state = changed;
  showMachine(state);
  if (question || state.profile !== before) showKnown(state, question ?? {});
  else if (isOther) byId("logged").value = "";
  update();
}

function begin() {
  showMachine(state);
  showKnown(state, firstQuestion() ?? {});
  listenSliders();
  listenChoices();
  let width = innerWidth;
  addEventListener("resize", () => { if (latest?.curve && innerWidth !== width) { width = innerWidth; draw(); } });
  update();
}

begin();
