// One streamed request: objects as they arrive. Throws ApiError.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Yield the objects of a streamed response; aborting the signal cancels the request. */
export async function* streamed(path, body, { key, signal }) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, {
    method: "POST",
    headers,
    signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw await problem(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection was lost; the text is incomplete.");
    waiting += value;
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (object.error) throw new ApiError(0, object.error.message);
      yield object;
    }
  }
}

/** Return the error of a response that is not 2xx. */
export async function problem(response) {
  try {
    return new ApiError(response.status, (await response.json()).error.message);
  } catch {
    return new ApiError(response.status, `The server answered ${response.status}.`);
  }
}
