// The server's sessions: what it remembers, how large that is, and who may forget it.

const PAGE = 50;
const details = new Map();  // by id: {updated, tokens, bytes} from GET /v1/sessions/{id}
let sessions = [];
let sessionsAt = 0;
let sessionsShown = PAGE;
let loading = null;

// Loads the list; calls during a load are answered by one more load after it.
function loadSessions() {
  if (loading) {
    loading.again = true;
    return;
  }
  const mine = {again: false};
  loading = mine;
  (async () => {
    try {
      sessions = (await getJson('v1/sessions')).data;
      sessionsAt = Date.now();
      setNote($('sessions-problem'), '');
      showSessions();
      await loadDetails();
    } catch (error) {
      setNote($('sessions-problem'), error.message);
    }
    loading = null;
    if (mine.again) loadSessions();
  })();
}

// What only the sessions themselves tell, one after the other, where it has changed.
async function loadDetails() {
  for (const {id, updated} of sessions.slice(0, sessionsShown)) {
    if (details.get(id)?.updated === updated) continue;
    try {
      const full = await getJson(`v1/sessions/${encodeURIComponent(id)}`);
      details.set(id, {updated, saved: full.saved_tokens, bytes: full.saved_bytes});
    } catch (error) {
      if (error.status !== 404) throw error;  // 404: deleted meanwhile
    }
    showSessions();
  }
}

const chatOfSession = (id) => [...chats.values()].find((chat) => chat.session === id);

function sessionRow({id}) {
  const of = () => sessions.find((session) => session.id === id);
  const row = el('li', {},
    el('p', {class: 'name'}),
    el('p', {class: 'hint facts'}),
    el('div', {class: 'buttons'},
      el('button', {type: 'button', onclick: () => change(row, id, {pinned: !of().pinned})}, 'Pin'),
      el('button', {type: 'button', onclick: () => rename(row, id)}, 'Rename'),
      el('button', {type: 'button', onclick: () => forget(row, id)}, 'Delete')),
    el('p', {class: 'problem', role: 'alert', hidden: true}));
  for (const button of row.querySelectorAll('button')) {
    button.setAttribute('aria-label', `${button.textContent} ${id}`);
  }
  return row;
}

function sessionFacts(session) {
  const more = details.get(session.id);
  const seconds = session.age_s + (Date.now() - sessionsAt) / 1000;
  return [
    tokens(session.tokens),
    more ? `${number(more.saved)} saved, ${bytes(more.bytes)}` : '…',
    age(seconds),
  ].join(' · ');
}

function showSessions() {
  const shown = sessions.slice(0, sessionsShown);
  syncList($('session-list'), shown, (session) => session.id, sessionRow, (row, session) => {
    const [name, facts, buttons] = row.children;
    const chat = chatOfSession(session.id);
    setText(name, chat?.title ? `${session.id} – ${chat.title}` : session.id);
    setText(facts, sessionFacts(session));
    buttons.firstChild.setAttribute('aria-pressed', String(session.pinned));
    setText(buttons.firstChild, session.pinned ? 'Pinned' : 'Pin');
  });
  setText($('sessions-note'), sessions.length
    ? `${number(sessions.length)} kept, the latest first`
    : 'Nothing is kept yet: it begins with an answer.');
  $('sessions-more').hidden = sessions.length <= sessionsShown;
}

// Runs a change of a session; an error is shown in its row. True when it worked.
async function attempt(row, work) {
  try {
    await work();
    setNote(row.lastChild, '');
    return true;
  } catch (error) {
    setNote(row.lastChild, error.message);
    return false;
  } finally {
    loadSessions();
  }
}

const change = (row, id, body) =>
  attempt(row, () => request('PATCH', `v1/sessions/${encodeURIComponent(id)}`, {body}));

async function rename(row, id) {
  const name = await ask({
    title: 'Rename this session', yes: 'Rename', value: id,
    text: 'Clients that go on with it by name must use the new one.',
  });
  if (!name || name === id || !await change(row, id, {id: name})) return;
  const chat = chatOfSession(id);
  if (!chat) return;
  chat.session = name;
  saveChat(chat);
}

async function forget(row, id) {
  const agreed = await ask({
    title: 'Delete this session?', yes: 'Delete',
    text: `The server forgets “${id}” and the saved state that only it uses.${chatOfSession(id)
      ? ' Its text stays in this browser; going on with it computes it again.' : ''}`,
  });
  if (!agreed) return;
  if (await attempt(row, () => request('DELETE', `v1/sessions/${encodeURIComponent(id)}`))) {
    $('sessions-reload').focus();
  }
}

$('sessions-reload').addEventListener('click', loadSessions);
$('sessions-more').addEventListener('click', () => {
  sessionsShown += PAGE;
  showSessions();
  loadSessions();
});
keyListeners.push(loadSessions);
setInterval(showSessions, 30_000);
