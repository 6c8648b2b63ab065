// A reply that is being received: asks for it, and puts what comes into its message.

// What a message's state says: going (elsewhere: in another tab), done, stopped (by the user), left (the page was), failed.
export class Reply {
  // `findModel()`: resolves to what is known of the model. `changed()`: the message has changed. `ended()`: it will not any more.
  constructor(api, findModel, settings, conversation, { changed, ended }) {
    this.conversation = conversation;
    this.message = conversation.messages.at(-1);
    this.changed = changed;
    this.ended = ended;
    this.controller = new AbortController();
    this.left = false;
    this.started = null; // seconds, when the first token came
    this.run(api, findModel, settings);
  }

  stop() {
    this.controller.abort();
  }

  // The page goes away, and the connection with it.
  leave() {
    this.left = true;
    this.message.state = "left";
    this.controller.abort();
  }

  async run(api, findModel, settings) {
    const { message } = this;
    try {
      const model = await findModel();
      const [path, body] = (model.continues ? continuation : chat)(this.conversation, settings, model);
      const chunks = api.stream(path, { model: model.id, ...body }, this.controller.signal, (queued) => {
        message.queued = queued;
        this.changed();
      });
      for await (const chunk of chunks) this.take(chunk);
      message.state = "done";
    } catch (error) {
      message.state = this.left ? "left" : this.controller.signal.aborted ? "stopped" : "failed";
      if (message.state === "failed") message.error = error.message;
    }
    delete message.queued;
    this.ended();
  }

  take(chunk) {
    const { message } = this;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const text = delta.content ?? choice?.text ?? "";
    if (reasoning || text) {
      this.started ??= performance.now() / 1000;
      message.seconds = performance.now() / 1000 - this.started;
      delete message.queued;
    }
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    message.content += text;
    // OpenAI's form has no word for an end by lack of memory: the server says it beside.
    if (choice?.finish_reason) message.finish = choice.mlxmoe?.finish_reason ?? choice.finish_reason;
    if (chunk.usage?.completion_tokens) message.tokens = chunk.usage.completion_tokens;
    this.changed();
  }
}

function chat({ messages }, settings) {
  const turns = [];
  for (const { role, content } of messages.slice(0, -1)) {
    // Many templates refuse two turns of one role, which a reply that failed would leave.
    if (turns.at(-1)?.role === role) turns.at(-1).content += `\n\n${content}`;
    else if (content) turns.push({ role, content });
  }
  if (settings.system.trim()) turns.unshift({ role: "system", content: settings.system });
  return ["v1/chat/completions", { messages: turns, ...sampling(settings) }];
}

function continuation({ messages }, settings, { piece }) {
  let prompt = "";
  for (const { role, content } of messages.slice(0, -1)) {
    const glue = role === "user" && prompt && content && !/\s$/.test(prompt) && !/^\s/.test(content);
    prompt += glue ? ` ${content}` : content;
  }
  // Without max_tokens a completion has 16 of them.
  return ["v1/completions", { prompt, max_tokens: piece, ...sampling(settings) }];
}

function sampling({ temperature, maxTokens }) {
  const limit = maxTokens ? { max_tokens: maxTokens } : {};
  return { temperature, ...limit, stream: true, stream_options: { include_usage: true } };
}
