// Builds the page into the Python package, which serves it; `npm run dev` proxies to a server.
/// <reference types="vitest/config" />
import { defineConfig } from "vite";

export default defineConfig({
  // The server completes the addresses in index.html, because it may be below another path.
  base: "./",
  esbuild: { jsx: "automatic" },
  build: {
    outDir: "../src/holdfast/api/static",
    emptyOutDir: true,
    target: "es2022",
    // The server's content security policy allows files of its own and no data: addresses.
    assetsInlineLimit: 0,
    // ELK is one large file by itself, loaded by the worker of the Lineage page alone.
    chunkSizeWarningLimit: 1700,
    rollupOptions: {
      // Libraries mark their files for other bundlers; here the marks mean nothing.
      onwarn: (warning, warn) => {
        if (warning.code !== "MODULE_LEVEL_DIRECTIVE") warn(warning);
      },
    },
  },
  // For busy machines.
  test: { testTimeout: 60_000 },
  server: { proxy: { "/api": process.env.HOLDFAST_SERVER ?? "http://127.0.0.1:8470" } },
});
