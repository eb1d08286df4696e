// The event stream of all tabs of a browser. It allows six connections to a server over HTTP/1.1,
// so six tabs with a stream each would leave none for requests.
import { openStream, type News, type Stream } from "./stream";

/** What a tab asks for: its address of the stream first, and later `again`. */
export type Ask = { url: string; after: string | undefined } | "again";

const ports = new Set<MessagePort>();
let stream: Stream | undefined;

const tell = (news: News) => {
  // A port of a tab that was closed ignores this.
  for (const port of ports) port.postMessage(news);
};

addEventListener("connect", (event) => {
  const [port] = (event as MessageEvent).ports;
  if (!port) return;
  port.onmessage = ({ data }: MessageEvent<Ask>) => {
    if (data === "again") {
      stream?.reopen();
      return;
    }
    ports.add(port);
    if (stream?.isOpen()) port.postMessage({ name: "open", data: "{}" } satisfies News);
    stream ??= openStream(data.url, data.after, tell);
  };
});
