// Asking the server: the messages of a conversation go out, an answer is streamed in.

const SAVE_EVERY_MS = 1000;
const BROKEN = 'The connection broke before the answer was complete.';

// What the server is sent. Messages of one role that follow each other (an answer between them has
// failed) become one, since many chat templates want roles to alternate.
function requestBody(chat) {
  const messages = [];
  if (chat.options.system) messages.push({role: 'system', content: chat.options.system});
  for (const {role, text, reasoning} of chat.messages) {
    if (!text && !reasoning) continue;
    const last = messages.at(-1);
    if (last?.role === role) {
      last.content += `\n\n${text}`;
    } else {
      messages.push({role, content: text, ...(reasoning && {reasoning_content: reasoning})});
    }
  }
  return {
    messages, stream: true, stream_options: {include_usage: true}, session_id: chat.session,
    truncation: 'auto',
    temperature: chat.options.temperature, max_tokens: chat.options.max_tokens,
  };
}

// Takes one event of the stream into the message.
function takeEvent(message, event) {
  if (event.error) {
    throw new ApiError(0, `The server gave up on this answer: ${event.error.message}`);
  }
  if (event.usage) message.usage = event.usage;
  if (event.timings) message.timings = event.timings;
  if (event.hcache) message.hcache = event.hcache;
  const choice = event.choices?.[0];
  if (!choice) return;
  const {content, reasoning_content: reasoning} = choice.delta ?? {};
  if (content || reasoning) message.state = 'writing';
  if (reasoning) message.reasoning = (message.reasoning ?? '') + reasoning;
  if (content) message.text += content;
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

async function readAnswer(chat, run) {
  const {message, abort: {signal}} = run;
  const response = await request('POST', 'v1/chat/completions', {body: requestBody(chat), signal});
  let saved = Date.now();
  try {
    for await (const data of events(response)) {
      if (data === '[DONE]') {
        message.state = message.finish === 'length' ? 'length' : 'done';
        return;
      }
      const before = message.text.length;
      takeEvent(message, JSON.parse(data));
      if (chat === current) announce(message.text.slice(before));
      paintSoon(chat);
      if (Date.now() - saved > SAVE_EVERY_MS) {
        saved = Date.now();
        saveChat(chat);
      }
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
  }
  if (signal.aborted) throw new DOMException('stopped', 'AbortError');
  throw new ApiError(0, BROKEN);
}

// Answers the last message of a conversation. Returns when the answer is there or has failed.
async function answer(chat) {
  if (runs.has(chat.id)) return;
  const message = {role: 'assistant', text: '', state: 'waiting'};
  const run = {message, abort: new AbortController()};
  runs.set(chat.id, run);
  chat.messages.push(message);
  chat.updated = Date.now();
  saveChat(chat);
  showChats();
  showMessages();
  try {
    await readAnswer(chat, run);
  } catch (error) {
    message.state = run.abort.signal.aborted ? 'stopped' : 'failed';
    message.error = message.state === 'failed' ? error.message : undefined;
    message.wantsKey = error.status === 401;
  }
  runs.delete(chat.id);
  announceRest();
  if (!chats.has(chat.id)) return;  // it was deleted meanwhile
  chat.updated = Date.now();
  saveChat(chat);
  showChats();
  showMessages();
  loadSessions();
}

function send(text) {
  const chat = current;
  chat.messages = chat.messages.filter((m) => m.role === 'user' || m.text || m.reasoning);
  chat.messages.push({role: 'user', text});
  chat.title ||= text.replace(/\s+/g, ' ').slice(0, TITLE_LENGTH);
  scrollToEnd();
  answer(chat);
}

// Answers the last question again; what was answered before is gone.
function retry(chat) {
  if (runs.has(chat.id)) return;
  if (chat.messages.at(-1)?.role === 'assistant') chat.messages.pop();
  scrollToEnd();
  answer(chat);
}

const stop = () => runs.get(current.id)?.abort.abort();

keyListeners.push(() => {
  if (apiKey && current.messages.at(-1)?.wantsKey) retry(current);
});

window.addEventListener('pagehide', () => {
  for (const id of runs.keys()) saveChat(chats.get(id));
});

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  if (runs.has(current.id)) {
    stop();
    return;
  }
  const text = $('input').value.trim();
  if (!text) return;
  $('input').value = '';
  send(text);
});

$('input').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!runs.has(current.id)) $('composer').requestSubmit();
});
