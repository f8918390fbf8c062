// Talks in the browser's own database, and the few words that fit into localStorage.
//
// A talk: {id, title, updated, settings, messages}. A message: {role: user | assistant | tool, content} and, of an assistant's,
// reasoning, tool_calls, stats, note. A head is what the list of talks needs of one.
'use strict';

class TalkStore {
  constructor() {
    this.memory = new Map();      // stands in where there is no database (some private windows)
    this.isKept = true;
    this.ready = this.open();
  }

  async open() {
    try {
      return await new Promise((resolve, reject) => {
        const request = indexedDB.open('beryl', 1);
        request.onupgradeneeded = () => {
          request.result.createObjectStore('talks', {keyPath: 'id'});
          request.result.createObjectStore('heads', {keyPath: 'id'});
        };
        request.onsuccess = () => resolve(request.result);
        request.onerror = () => reject(request.error);
        request.onblocked = () => reject(new Error('blocked'));
      });
    } catch {
      this.isKept = false;
      return null;
    }
  }

  // work(talks, heads) returns a request or nothing; resolves to its result once all is on the disk.
  async transact(mode, work) {
    const database = await this.ready;
    return new Promise((resolve, reject) => {
      const transaction = database.transaction(['talks', 'heads'], mode);
      const request = work(transaction.objectStore('talks'), transaction.objectStore('heads'));
      transaction.oncomplete = () => resolve(request?.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }

  // The latest first.
  async heads() {
    const all = await this.ready ? await this.transact('readonly', (talks, heads) => heads.getAll())
                                 : [...this.memory.values()].map(({id, title, updated}) => ({id, title, updated}));
    return all.sort((a, b) => b.updated - a.updated);
  }

  async read(id) {
    return await this.ready ? this.transact('readonly', talks => talks.get(id)) : structuredClone(this.memory.get(id));
  }

  async write(talk) {
    if (!await this.ready) return void this.memory.set(talk.id, structuredClone(talk));
    await this.transact('readwrite', (talks, heads) => {
      talks.put(talk);
      heads.put({id: talk.id, title: talk.title, updated: talk.updated});
    });
  }

  async remove(id) {
    if (!await this.ready) return void this.memory.delete(id);
    await this.transact('readwrite', (talks, heads) => {
      talks.delete(id);
      heads.delete(id);
    });
  }
}

const words = {
  read(name) {
    try {
      return localStorage.getItem('beryl-' + name) ?? '';
    } catch {
      return '';
    }
  },
  write(name, text) {
    try {
      if (text) localStorage.setItem('beryl-' + name, text);
      else localStorage.removeItem('beryl-' + name);
    } catch { /* a browser that keeps nothing */ }
  },
};
