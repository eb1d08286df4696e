// Builds the page into the Python package, which serves it; `npm run dev` proxies to a server.
/// <reference types="vitest/config" />
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { defineConfig, type Plugin } from "vite";

/** Writes each script and style sheet in compressed form beside itself, for the server. */
const compressed: Plugin = {
  name: "compressed",
  apply: "build",
  async writeBundle({ dir = "" }, files) {
    for (const name of Object.keys(files).filter((one) => /\.(js|css)$/.test(one))) {
      const path = join(dir, name);
      await writeFile(`${path}.gz`, gzipSync(await readFile(path), { level: 9 }));
    }
  },
};

export default defineConfig({
  // The server completes the addresses in index.html, because it may be below another path.
  base: "./",
  plugins: [compressed],
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
