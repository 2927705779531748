// The conversations of this browser. Each lies under a key of its own in localStorage, so that tabs
// do not overwrite each other's.
//
// A conversation: {id, session, title, created, updated, options, messages}; a message: {role,
// text, reasoning, state, error, hcache, timings, usage}. States of an answer: waiting, writing,
// done, length, stopped, failed.

const CHAT_KEY = 'hcache.chat.';
const CURRENT_KEY = 'hcache.current';
const TITLE_LENGTH = 60;
const chats = new Map();
const runs = new Map();  // by conversation: what is being answered
let current = null;

function newChat() {
  const id = randomId();
  return {id, session: `web-${id}`, title: '', created: Date.now(), updated: Date.now(),
    options: {}, messages: []};
}

// A conversation as it was stored; null for anything else.
function parseChat(text) {
  let chat;
  try {
    chat = JSON.parse(text);
  } catch {
    return null;
  }
  if (!chat?.id || !chat.session || !Array.isArray(chat.messages)) return null;
  return chat;
}

// The page that was writing an answer is gone; what it had is kept.
function closeBrokenAnswer(chat) {
  const last = chat.messages.at(-1);
  if (last?.state !== 'waiting' && last?.state !== 'writing') return;
  last.state = 'failed';
  last.error = 'The page was closed while this was written.';
}

function loadChats() {
  for (const key of Object.keys(localStorage)) {
    if (!key.startsWith(CHAT_KEY)) continue;
    const chat = parseChat(localStorage.getItem(key));
    if (!chat) continue;
    closeBrokenAnswer(chat);
    chats.set(chat.id, chat);
  }
  current = chats.get(localStorage.getItem(CURRENT_KEY)) ?? newChat();
}

function saveChat(chat) {
  chats.set(chat.id, chat);
  try {
    localStorage.setItem(CHAT_KEY + chat.id, JSON.stringify(chat));
    localStorage.setItem(CURRENT_KEY, current.id);
    setNote($('storage-problem'), '');
  } catch {
    setNote($('storage-problem'), 'This browser’s storage is full: the conversation is lost when '
      + 'the page is closed. Delete older conversations.');
  }
}

function openChat(chat) {
  current = chat;
  if (chats.has(chat.id)) localStorage.setItem(CURRENT_KEY, chat.id);
  showChats();
  showMessages();
  showOptions();
}

async function deleteChat(chat) {
  const agreed = await ask({
    title: 'Delete this conversation?', yes: 'Delete',
    text: `“${chat.title}” is deleted in this browser, and its session with its saved state on `
      + 'the server.',
  });
  if (!agreed) return;
  runs.get(chat.id)?.abort.abort();
  try {
    await request('DELETE', `v1/sessions/${encodeURIComponent(chat.session)}`);
  } catch (error) {
    if (error.status !== 404) {
      setNote(chatProblem(chat), error.message);
      return;
    }
  }
  dropChat(chat);
  localStorage.removeItem(CHAT_KEY + chat.id);
  loadSessions();
  $('new-chat').focus();
}

function dropChat(chat) {
  chats.delete(chat.id);
  if (current === chat) openChat(newChat());
  else showChats();
}

const chatProblem = (chat) =>
  $('chat-list').querySelector(`[data-key="${chat.id}"] .problem`);

function chatRow(chat) {
  const {id} = chat;
  return el('li', {},
    el('button', {type: 'button', class: 'open', onclick: () => {
      openChat(chats.get(id));
      closePanels();
      $('input').focus();
    }}),
    el('button', {type: 'button', class: 'delete', onclick: () => deleteChat(chats.get(id))}, '×'),
    el('p', {class: 'problem', role: 'alert', hidden: true}));
}

function showChats() {
  const list = [...chats.values()].sort((a, b) => b.updated - a.updated);
  syncList($('chat-list'), list, (chat) => chat.id, chatRow, (row, chat) => {
    const [open, remove] = row.children;
    setText(open, (runs.has(chat.id) ? 'Writing: ' : '') + chat.title);
    if (chat === current) open.setAttribute('aria-current', 'true');
    else open.removeAttribute('aria-current');
    remove.setAttribute('aria-label', `Delete ${chat.title}`);
  });
}

function showOptions() {
  $('system').value = current.options.system ?? '';
  $('temperature').value = current.options.temperature ?? '';
  $('max-tokens').value = current.options.max_tokens ?? '';
}

$('options').addEventListener('change', () => {
  const numberOf = (input) => (input.value === '' || !input.validity.valid ? undefined
    : Number(input.value));
  current.options = {
    system: $('system').value.trim() || undefined,
    temperature: numberOf($('temperature')),
    max_tokens: numberOf($('max-tokens')),
  };
  if (chats.has(current.id)) saveChat(current);
});

$('new-chat').addEventListener('click', () => {
  openChat(newChat());
  closePanels();
  $('input').focus();
});

// Another tab has changed or deleted a conversation. One that is being answered here is ours.
window.addEventListener('storage', (event) => {
  if (!event.key?.startsWith(CHAT_KEY)) return;
  const id = event.key.slice(CHAT_KEY.length);
  if (runs.has(id)) return;
  const chat = event.newValue && parseChat(event.newValue);
  if (chat) {
    chats.set(id, chat);
    if (current.id === id) openChat(chat);
    else showChats();
  } else if (chats.has(id)) {
    dropChat(chats.get(id));
  }
});
