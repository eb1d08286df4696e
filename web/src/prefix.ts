// The server's path below its proxy, such as `/holdfast`; empty without one.
export const PREFIX =
  document.querySelector<HTMLMetaElement>('meta[name="prefix"]')?.content ?? "";
