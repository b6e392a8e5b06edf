// The live page: asks the router every two seconds, draws what it says. Text goes in as text only.

const PERIOD_MS = 2000;
const SHOWN = 30;
const $ = (id) => document.getElementById(id);
const ms = (value) => (value == null ? "–" : value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`);
const rate = (value) => (value == null ? "–" : value.toFixed(value < 10 ? 2 : 0));
const share = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "polyline", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child != null));
  return node;
}

// Where API keys are in force the page needs an admin's; it is kept for this tab only.
let asked = false;

async function get(path) {
  const key = sessionStorage.getItem("baton-key");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers, signal: AbortSignal.timeout(10000) });
  if (response.status === 401 && !asked) {
    asked = true;
    const given = prompt("API key of an admin");
    if (given) {
      sessionStorage.setItem("baton-key", given.trim());
      return get(path);
    }
  }
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

// --- now -----------------------------------------------------------------------------------

function drawTiles(report) {
  const both = (row) => (row.count ? `${ms(row.p50).replace(" ms", "")} / ${ms(row.p99)}` : "–");
  const tiles = [
    ["requests / s", rate(report.request_throughput)],
    ["tokens / s", rate(report.output_throughput)],
    ["TTFT p50 / p99", both(report.ttft_ms)],
    ["TPOT p50 / p99", both(report.tpot_ms)],
    ["targets kept", share(report.attainment)],
    ["goodput / s", rate(report.goodput)],
    ["prefix hits", share(report.hit_rate)],
    ["failed", String(report.failed)],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// --- charts --------------------------------------------------------------------------------

function chart(title, series, unit, most) {
  const points = series.flatMap(([, values]) => values);
  const figure = make("figure", {}, make("figcaption", {}, title));
  if (!points.length) {
    figure.append(make("p", { class: "note" }, "Nothing was seen yet."));
    return figure;
  }
  const [start, end] = [Math.min(...points.map(([at]) => at)), Math.max(...points.map(([at]) => at))];
  const top = most ?? (Math.max(...points.map(([, value]) => value)) * 1.1 || 1);
  const svg = make("svg", { viewBox: "0 0 320 110", role: "img", "aria-label": title });
  series.forEach(([name, values], index) => {
    const place = ([at, value]) => `${end > start ? 4 + (312 * (at - start)) / (end - start) : 160},${100 - (88 * value) / top}`;
    const line = values.length > 1 ? values : values.flatMap((point) => [point, point]);
    svg.append(make("polyline", { points: line.map(place).join(" "), class: `k${index}${values.length > 1 ? "" : " dot"}`, "stroke-linecap": "round" }, make("title", {}, name)));
  });
  series.forEach(([name], index) => svg.append(make("text", { x: 4 + 60 * index, y: 10, class: `k${index}` }, name)));
  svg.append(make("text", { x: 316, y: 10, "text-anchor": "end" }, `top ${unit(top)}`));
  figure.append(svg);
  return figure;
}

function drawCharts(report) {
  const over = (pick) => report.series.map((point) => [point.at, pick(point)]).filter(([, value]) => value != null);
  const latency = (name) => ["p50", "p99"].map((key) => [key, over((point) => point[name]?.[key])]);
  $("charts").replaceChildren(
    chart("TTFT", latency("ttft_ms"), ms),
    chart("TPOT", latency("tpot_ms"), ms),
    chart("Targets kept", [["share", over((point) => point.attainment)]], share, 1),
    chart("Requests per second", [["served", over((p) => p.request_throughput)], ["good", over((p) => p.goodput)]], rate),
  );
}

// --- workers -------------------------------------------------------------------------------

const COLUMNS = ["role", "worker", "running", "queue", "hand-offs", "KV pool", "TTFT seen", "predicted", "TPOT seen", "predicted", ""];

function drawWorkers(workers, report) {
  const seen = new Map(report.workers.map((row) => [row.worker, row]));
  const head = make("thead", {}, make("tr", {}, ...COLUMNS.map((name) => make("th", { scope: "col" }, name))));
  const sorted = workers.toSorted((a, b) => b.role.localeCompare(a.role) || a.worker_id.localeCompare(b.worker_id));
  const body = make("tbody", {}, ...sorted.map((worker) => workerRow(worker, seen.get(worker.worker_id))));
  $("workers").replaceChildren(head, body);
}

function workerRow(worker, seen) {
  const used = 1 - worker.load.free_blocks / Math.max(worker.num_blocks, 1);
  const meter = make("meter", { min: 0, max: 1, high: 0.9, value: used, "aria-label": `KV pool of ${worker.worker_id}` });
  const cells = [
    worker.role,
    worker.worker_id,
    `${worker.load.running} / ${worker.max_num_seqs}`,
    String(worker.load.waiting),
    String(worker.load.handoffs_in_flight),
    [meter, ` ${Math.round(100 * used)} %`],
    ms(seen?.ttft_ms?.p50),
    ms(seen?.predicted_ttft_ms),
    ms(seen?.tpot_ms?.p50),
    ms(seen?.predicted_tpot_ms),
    worker.load.draining ? "draining" : "",
  ];
  return make("tr", {}, ...cells.map((cell) => make("td", {}, ...[cell].flat())));
}

// --- requests ------------------------------------------------------------------------------

const opened = new Map();

function drawRequests(rows) {
  const list = $("rows");
  const known = new Map([...list.children].map((node) => [node.dataset.key, node]));
  const nodes = rows.map((row) => known.get(keyOf(row)) ?? requestRow(row));
  // Rows that stay are not touched: neither focus nor an open waterfall is lost.
  const focused = document.activeElement;
  if (nodes.length !== list.children.length || nodes.some((node, index) => list.children[index] !== node)) {
    list.replaceChildren(...nodes);
    if (list.contains(focused)) focused.focus({ preventScroll: true });
  }
  if (!nodes.length) list.replaceChildren(make("p", { class: "note" }, "None yet."));
}

const keyOf = (row) => `${row.id}@${row.started_at}`;

function requestRow(row) {
  const missed = (seen, target) => (target != null && seen > target ? "missed" : "");
  const target = (value) => (value == null ? "" : ` of ${ms(value)}`);
  const node = make(
    "details",
    { "data-key": keyOf(row) },
    make(
      "summary",
      {},
      make("span", { class: "id" }, row.id),
      row.status === 200 ? null : make("span", { class: "failed" }, row.status === 499 ? "left" : `failed ${row.status}`),
      make("span", { class: missed(row.ttft_ms, row.ttft_target_ms) }, `TTFT ${ms(row.ttft_ms)}${target(row.ttft_target_ms)}`),
      make("span", { class: missed(row.tpot_ms, row.tpot_target_ms) }, `TPOT ${ms(row.tpot_ms)}${target(row.tpot_target_ms)}`),
      make("small", {}, `${row.prompt_tokens} → ${row.output_tokens} tokens, ${ms(row.total_ms)}`),
    ),
  );
  node.addEventListener("toggle", () => node.open && !opened.has(node) && openRequest(node, row.id));
  return node;
}

async function openRequest(node, id) {
  opened.set(node, true);
  const note = make("p", { class: "note" }, "loading");
  node.append(note);
  try {
    const found = await get(`/v1/requests/${encodeURIComponent(id)}`);
    note.textContent = aboutRequest(found);
    node.append(...waterfall(found.timing));
  } catch (error) {
    note.textContent = `Not known any more (${error.message}).`;
  }
}

function aboutRequest(found) {
  const path = [...found.prefill, ...found.decode].join(" → ");
  const predicted = found.placement && `predicted TTFT ${ms(found.placement.chosen.ttft_ms)}`;
  const other = found.misses.length && found.placement?.other;
  const instead = other && `${[other.prefill, other.decode].filter(Boolean).join(" → ")} was predicted ${ms(other.ttft_ms)}`;
  const missed = found.misses.map((miss) => `missed ${miss.target.toUpperCase()}: ${miss.cause.replaceAll("_", " ")}`);
  const moved = found.timing.transfer && `KV ${(found.timing.transfer.bytes / 1e6).toFixed(1)} MB by ${found.timing.transfer.transports.join(", ")}`;
  return [path, predicted, moved, ...missed, instead].filter(Boolean).join("; ");
}

function waterfall(timing) {
  const lanes = new Map();
  for (const phase of timing.phases) {
    const key = `${phase.name} ${phase.where}`;
    if (!lanes.has(key)) lanes.set(key, []);
    lanes.get(key).push(phase);
  }
  return [...lanes.values()].map((phases, index) => lane(phases, timing.total_ms, index % 6));
}

function lane(phases, total, colour) {
  const { name, where } = phases[0];
  const counted = phases.filter((phase) => !phase.overlapped).reduce((sum, phase) => sum + phase.duration_ms, 0);
  const title = `${name} at ${where}: ${ms(counted)} of ${ms(total)}`;
  const svg = make("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": title });
  for (const piece of joined(phases, total / 1000)) {
    const width = Math.max((1000 * piece.duration_ms) / total, 1.5);
    svg.append(make("rect", { x: (1000 * piece.start_ms) / total, y: 2, width, height: 12, class: `k${colour}${piece.overlapped ? " overlapped" : ""}` }));
  }
  return make("div", { class: "lane" }, make("span", { title: `${name} (${where})` }, name.replaceAll("_", " ")), svg, make("span", {}, counted ? ms(counted) : "hidden"));
}

// Pieces closer than a pixel become one: a long answer has thousands.
function joined(phases, gap) {
  const pieces = [];
  for (const phase of phases) {
    const last = pieces.at(-1);
    if (last && last.overlapped === phase.overlapped && phase.start_ms - last.start_ms - last.duration_ms < gap) {
      last.duration_ms = phase.start_ms + phase.duration_ms - last.start_ms;
    } else {
      pieces.push({ ...phase });
    }
  }
  return pieces;
}

// --- the loop ------------------------------------------------------------------------------

let paused = false;

async function refresh() {
  try {
    const [workers, report, requests] = await Promise.all([
      get("/workers"),
      get(`/v1/reports?window=${$("window").value}`),
      get(`/v1/requests?limit=${SHOWN}`),
    ]);
    drawTiles(report);
    drawCharts(report);
    drawWorkers(workers.workers, report);
    drawRequests(requests.data);
    const missing = [...new Set([...report.missing, ...requests.missing])];
    $("state").className = missing.length ? "bad" : "";
    $("state").textContent = missing.length ? `incomplete: ${missing.join("; ")}` : paused ? "paused" : "live";
  } catch (error) {
    $("state").className = "bad";
    $("state").textContent = `no answer from the router (${error.message})`;
  }
}

async function loop() {
  for (;;) {
    if (!paused && !document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  $("state").textContent = paused ? "paused" : "live";
});
$("window").addEventListener("change", refresh);
loop();
