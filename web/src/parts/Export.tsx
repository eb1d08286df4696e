// Export of a checkpoint into its run's folder, in a format for other programs.
import { useState } from "react";
import type { Job } from "../api/types";
import { bytes } from "../format";
import { JobButton } from "./Job";
import { State } from "./basics";

const FORMS = [
  ["safetensors", "safetensors (weights only)"],
  ["hf", "Hugging Face (weights only)"],
  ["torch", "torch.load (full state)"],
  ["dcp", "PyTorch DCP (full state)"],
] as const;

function describe(job: Job) {
  if (job.state === "failed") return <State state="failed">{job.error ?? "failed"}</State>;
  if (job.state !== "done") return <State state="running">exporting</State>;
  return (
    <>
      <State state="committed">{bytes(job.result?.bytes ?? 0)} in</State>{" "}
      <code className="breaks">{job.result?.path}</code>
    </>
  );
}

export function Export({ id }: { id: string }) {
  const [form, setForm] = useState<string>(FORMS[0][0]);
  return (
    <div className="export">
      <label>
        Format{" "}
        <select value={form} onChange={(event) => setForm(event.target.value)}>
          {FORMS.map(([name, words]) => <option key={name} value={name}>{words}</option>)}
        </select>
      </label>{" "}
      <JobButton
        key={form}
        word="Export"
        path={`/checkpoints/${encodeURIComponent(id)}/export`}
        body={{ to: form }}
        say={describe}
      />
    </div>
  );
}
