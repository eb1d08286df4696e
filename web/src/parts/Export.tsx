// A checkpoint written in a form that other programs read, into its run's folder.
import { useState } from "react";
import type { Job } from "../api/types";
import { bytes } from "../format";
import { JobButton } from "./Job";
import { State } from "./basics";

const FORMS = [
  ["safetensors", "safetensors, the weights"],
  ["hf", "Hugging Face, the weights"],
  ["torch", "torch.load, the whole state"],
  ["dcp", "PyTorch DCP, the whole state"],
] as const;

function told(job: Job) {
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
        say={told}
      />
    </div>
  );
}
