// The server's memory, once a second: from /events, or from /metrics and /v1/store of a server or
// a proxy without it.

const POLL_MS = 2000;
const RETRY_MS = 2000;
const REQUEST_STATES = ['queued', 'fetching', 'restoring', 'prefill', 'decoding'];
const serverModel = {name: '', context: 0};
let watching = null;

function gauge(id, title) {
  const node = el('div', {class: 'gauge', id: `gauge-${id}`},
    el('h3', {}, title), el('p', {class: 'value'}, '–'), bar([], 1),
    el('p', {class: 'hint'}, '\u00a0'));
  $('gauges').append(node);
  return ({value, parts, total, note}) => {
    setText(node.children[1], value);
    drawBar(node.children[2], parts, total);
    setText(node.children[3], note || '\u00a0');
  };
}

const showArena = gauge('arena', 'KV cache');
const showDram = gauge('dram', 'Host memory');
const showDisk = gauge('disk', 'Disk');
const showRequests = gauge('requests', 'Requests');

// `state` as /events sends it.
function showState({arena, requests, tiers}) {
  const used = arena.active + arena.idle;
  showArena({
    value: `${number(used)} of ${tokens(arena.cells)}`,
    parts: [['active', arena.active], ['idle', arena.idle]], total: arena.cells,
    note: `${number(arena.active)} in use, ${number(arena.idle)} kept for later`,
  });
  showDram(tierView(tiers?.dram, 'hcache serve --dram gives it room'));
  showDisk(tierView(tiers?.disk, tiers ? '' : 'This server saves nothing (--no-store).'));
  const counts = REQUEST_STATES.map((name) => [name, requests[name] ?? 0]).filter(([, n]) => n > 0);
  const running = counts.reduce((sum, [, n]) => sum + n, 0);
  showRequests({
    value: running ? number(running) : 'none', parts: counts, total: running,
    note: counts.map(([name, n]) => `${n} ${name}`).join(', '),
  });
}

// A tier without a capacity has no limit; one without use and capacity is not there.
function tierView(tier, absent) {
  const {used = 0, capacity = 0} = tier ?? {};
  if (!used && !capacity) return {value: 'empty', parts: [], total: 1, note: absent};
  if (!capacity) return {value: bytes(used), parts: [], total: 1, note: 'no limit is set'};
  return {
    value: `${bytes(used)} of ${bytes(capacity)}`, parts: [['used', used]], total: capacity,
    note: `${percent(used / capacity)} full`,
  };
}

// One value of Prometheus's text format; 0 where there is none.
function metric(text, name, label = '') {
  const line = text.split('\n').find((l) => l.startsWith(label ? `${name}{${label}}` : `${name} `));
  return line ? Number(line.slice(line.lastIndexOf(' '))) : 0;
}

async function pollState() {
  const text = await (await request('GET', 'metrics')).text();
  const cells = (use) => metric(text, 'hcache_arena_cells', `use="${use}"`);
  const state = {
    arena: {active: cells('active'), idle: cells('idle'),
      cells: cells('active') + cells('idle') + cells('free')},
    requests: Object.fromEntries(REQUEST_STATES.map(
      (name) => [name, metric(text, 'hcache_requests', `state="${name}"`)])),
  };
  try {
    const {tiers: {dram, disk}, quota_bytes: quota} = await getJson('v1/store');
    state.tiers = {
      dram: {used: dram.used_bytes, capacity: dram.capacity_bytes},
      disk: {used: disk.used_bytes, capacity: quota},
    };
  } catch (error) {
    if (error.status !== 409) throw error;  // 409: the server has no store
  }
  showState(state);
}

function showOnline(online) {
  setText($('online'), online ? 'Online' : 'Offline');
  $('online').classList.toggle('off', !online);
}

async function loadModel() {
  const [model] = (await getJson('v1/models')).data;
  serverModel.name = model?.id ?? '';
  serverModel.context = model?.meta?.n_ctx_train ?? 0;
  setText($('model'), serverModel.context
    ? `${serverModel.name} · ${tokens(serverModel.context)}` : serverModel.name);
  showRoom();
}

async function followEvents(signal) {
  const response = await request('GET', 'events', {signal});
  for await (const data of events(response)) showState(JSON.parse(data));
}

// One connection to the server: until it breaks, `signal` ends it, or there is no way to watch.
async function watchOnce(signal) {
  await loadModel();
  showOnline(true);
  loadSessions();
  try {
    await followEvents(signal);
  } catch (error) {
    if (error.status !== 404) throw error;
    while (!signal.aborted) {
      await pollState();
      await sleep(POLL_MS);
    }
  }
}

// Watches while the page can be seen.
async function watch() {
  watching?.abort();
  const mine = new AbortController();
  watching = mine;
  while (!mine.signal.aborted && !document.hidden) {
    try {
      await watchOnce(mine.signal);
      setNote($('gauges-problem'), '');
    } catch (error) {
      if (mine.signal.aborted) return;
      showOnline(Boolean(error.status));
      setNote($('gauges-problem'), error.status ? error.message : '');
      if (error.status === 401) return;  // a new key starts it again
    }
    await sleep(RETRY_MS);
  }
}

keyListeners.push(() => {
  setNote($('gauges-problem'), '');
  watch();
});
document.addEventListener('visibilitychange', () => {
  if (document.hidden) watching?.abort();
  else watch();
});
