// The server: requests with the API key, errors that say what to do, streams of events. Paths are
// relative, so that the page works below a proxy's prefix.

const KEY = 'hcache.key';
let apiKey = sessionStorage.getItem(KEY) ?? '';
const keyListeners = [];  // called when a new key was entered

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;  // 0: there was no answer
  }
}

const UNREACHABLE = 'The server can’t be reached. Check that it runs, then try again.';
const REMEDIES = {
  401: 'Enter an API key above.',
  429: 'The server has as many requests as it takes. Wait a moment, then try again.',
  503: 'The server is stopping or has no room. Try again in a moment.',
};

async function errorOf(response) {
  let message = '';
  let code = '';
  try {
    ({message, code} = (await response.json()).error);
  } catch {
    message = `The server answered ${response.status} ${response.statusText}.`;
  }
  if (code === 'context_length_exceeded') {
    message += ' – Begin a new conversation, or give the server more room (--ctx).';
  } else if (REMEDIES[response.status]) {
    message = `${REMEDIES[response.status]} (${message})`;
  }
  return new ApiError(response.status, message);
}

// The response, when it is a good one. Throws ApiError, or AbortError when `signal` says so.
async function request(method, path, {body, signal} = {}) {
  const headers = {};
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  if (body) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, cache: 'no-store', body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, UNREACHABLE);
  }
  if (response.ok) return response;
  if (response.status === 401) wantKey();
  throw await errorOf(response);
}

const getJson = async (path) => (await request('GET', path)).json();

// The data of every server-sent event, as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = '';
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split('\n\n');
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split('\n').filter((line) => line.startsWith('data:'));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join('\n');
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // it is over for us, whatever it says
  }
}

function wantKey() {
  if (!$('key-form').hidden) return;
  $('key-form').hidden = false;
  if (apiKey) {
    setText($('key-hint'), 'The server does not know the key that was used. Enter another one.');
  }
  $('key').value = '';
  if (!$('ask').open) $('key').focus();
}

$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setKey($('key').value.trim());
  $('key-form').hidden = true;
  $('input').focus();
  for (const listener of keyListeners) listener();
});

function setKey(key) {
  apiKey = key;
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  $('forget-key').hidden = !key;
}

$('forget-key').addEventListener('click', () => {
  setKey('');
  $('input').focus();
  for (const listener of keyListeners) listener();
});
$('forget-key').hidden = !apiKey;
