// The server, as this page asks it: which model there is, and a reply as a stream of events.
'use strict';

// What went wrong, for people. status 0: nothing answers.
class ApiFailure extends Error {
  constructor(message, status = 0, code = '') {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const api = {
  // path: relative, so that the page may lie below a path of a proxy.
  async ask(path, options = {}) {
    const key = words.read('key');
    const headers = {...(options.body ? {'Content-Type': 'application/json'} : {}), ...(key ? {Authorization: 'Bearer ' + key} : {})};
    let answer;
    try {
      answer = await fetch(path, {...options, headers, cache: 'no-store', redirect: 'error'});
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new ApiFailure('The server does not answer. Is it running?');
    }
    if (answer.ok) return answer;
    const text = await answer.text();
    let problem = {};
    try {
      problem = JSON.parse(text).error ?? {};
    } catch { /* not ours: a proxy's page */ }
    throw new ApiFailure(problem.message ?? `The server answers ${answer.status} ${answer.statusText}.`, answer.status, problem.code ?? '');
  },

  // {id, context_length}
  async model() {
    return (await (await api.ask('v1/models')).json()).data[0];
  },

  // The chunks of a chat completion.
  async* reply(body, signal) {
    const answer = await api.ask('v1/chat/completions', {
      method: 'POST', signal, body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true}}),
    });
    let text = '';
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      let step;
      try {
        step = await reader.read();
      } catch (error) {
        if (error.name === 'AbortError') throw error;
        throw new ApiFailure('The connection to the server broke.');
      }
      if (step.done) throw new ApiFailure('The server ended the reply before its end.');
      text += step.value;
      // An event is lines up to an empty one; what matters of them begins with "data: ". Comments keep the connection.
      let end;
      while ((end = text.indexOf('\n\n')) >= 0) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        for (const line of event.split('\n')) {
          if (!line.startsWith('data: ')) continue;
          if (line === 'data: [DONE]') return;
          const chunk = JSON.parse(line.slice(6));
          if (chunk.error) throw new ApiFailure(chunk.error.message, 500, chunk.error.code ?? '');
          yield chunk;
        }
      }
    }
  },
};
