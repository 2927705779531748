// The messages of the current conversation on the page.

const NEAR_END = 60;  // pixels: who has scrolled further up is left there
const STATUS = {
  waiting: 'Waiting for the first token …',
  writing: 'Writing …',
  stopped: 'You stopped this answer.',
};
const HINT = $('room').textContent;
const messageNodes = new WeakMap();
let paintPending = false;

function messageNode(message) {
  if (message.role === 'user') {
    return el('article', {class: 'message user', 'aria-label': 'You'},
      el('div', {class: 'text'}, message.text));
  }
  return el('article', {class: 'message assistant', 'aria-label': 'Model'},
    el('details', {class: 'reasoning', hidden: true}, el('summary', {}, 'Thinking'),
      el('div', {class: 'text'})),
    el('div', {class: 'text'}),
    el('p', {class: 'problem', hidden: true}),
    el('div', {class: 'origin-place'}),
    el('button', {type: 'button', class: 'retry', hidden: true, onclick: () => {
      retry(current);
      $('input').focus();
    }}, 'Try again'));
}

function paintMessage(message, isLast) {
  const node = messageNodes.get(message);
  if (message.role === 'user') return;
  const [reasoning, text, problem, origin, again] = node.children;
  const running = message.state === 'waiting' || message.state === 'writing';
  node.setAttribute('aria-busy', String(running));
  reasoning.hidden = !message.reasoning;
  setText(reasoning.lastChild, message.reasoning ?? '');
  showMarkdown(text, message.text);
  if (problem.textContent !== (message.error ?? '')) {
    problem.setAttribute('role', 'alert');
    setNote(problem, message.error);
  }
  const status = STATUS[message.state] ?? '';
  const shown = message.hcache ? JSON.stringify([message.hcache, message.usage]) : status;
  if (origin.dataset.shown !== shown) {
    origin.dataset.shown = shown;
    origin.replaceChildren(...(running || message.hcache ? [originNode(message, status)]
      : [el('p', {class: 'hint'}, status)]));
    if (message.state === 'length') {
      origin.append(el('p', {class: 'hint'}, 'The answer was cut: it reached its longest length, '
        + 'or the context is full.'));
    }
  }
  again.hidden = !isLast || running;
}

// Brings the page in line with the current conversation.
function showMessages() {
  const place = $('messages');
  const stay = atEnd();
  const wanted = current.messages.map((message) => {
    if (!messageNodes.has(message)) messageNodes.set(message, messageNode(message));
    return messageNodes.get(message);
  });
  if (!wanted.length) {
    wanted.push(place.querySelector('.welcome') ?? el('div', {class: 'welcome'},
      el('p', {class: 'heading'}, 'What you say here is not forgotten.'),
      el('p', {}, 'When the server restarts, the conversation goes on, and its context is restored '
        + 'instead of computed again. Under every answer stands where its context came from.')));
  }
  if (place.children.length !== wanted.length || wanted.some((n, i) => place.children[i] !== n)) {
    place.replaceChildren(...wanted);
  }
  const last = current.messages.at(-1);
  for (const message of current.messages) paintMessage(message, message === last);
  const running = runs.has(current.id);
  setText($('send'), running ? 'Stop' : 'Send');
  $('send').classList.toggle('danger', running);
  showRoom();
  if (stay) scrollToEnd();
}

function showRoom() {
  const usage = current.messages.findLast((message) => message.usage)?.usage;
  setText($('room'), usage && serverModel.context
    ? `${number(usage.total_tokens)} of ${tokens(serverModel.context)} used` : HINT);
}

// A frame's worth of new tokens is painted at once.
function paintSoon(chat) {
  if (chat !== current || paintPending) return;
  paintPending = true;
  requestAnimationFrame(() => {
    paintPending = false;
    const last = current.messages.at(-1);
    if (!last || !messageNodes.has(last)) return;
    const stay = atEnd();
    paintMessage(last, true);
    if (stay) scrollToEnd();
  });
}

function atEnd() {
  const place = $('messages');
  return place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_END;
}

const scrollToEnd = () => { $('messages').scrollTop = $('messages').scrollHeight; };

// Screen readers hear whole sentences, politely, and not every token.
let unheard = '';

function announce(text) {
  unheard += text;
  const end = Math.max(...['. ', '! ', '? ', '\n'].map((mark) => unheard.lastIndexOf(mark)));
  if (end < 0) return;
  hear(unheard.slice(0, end + 1));
  unheard = unheard.slice(end + 1);
}

function announceRest() {
  hear(unheard);
  unheard = '';
}

function hear(text) {
  if (!text.trim()) return;
  const live = $('live');
  live.append(el('p', {}, text.trim()));
  while (live.children.length > 20) live.firstChild.remove();
}
