// A client of a target. It reads the protos of the repository; nothing is generated.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
// longs: a seed has 64 bits, more than a number of JavaScript. oneofs: which input is set.
const OPTIONS = {
  includeDirs: [here("../../../protos"), here(".")],
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
};
const api = grpc.loadPackageDefinition(loader.loadSync("ssd/v1/generate.proto", OPTIONS)).ssd.v1;
const rpc = loader.loadSync("errors.proto", OPTIONS);

export class Client {
  constructor(address, credentials = grpc.credentials.createInsecure()) {
    this.generation = new api.GenerateService(address, credentials);
  }

  close() {
    this.generation.close();
  }

  // Yields the messages of one request. Leaving the loop early cancels it on the target.
  async *generate(request, { requestId } = {}) {
    const metadata = new grpc.Metadata();
    if (requestId) metadata.set("x-request-id", requestId);
    const call = this.generation.Generate(request, metadata);
    try {
      yield* call;
    } finally {
      call.cancel();
      call.on("error", () => {}); // the status CANCELLED of our own cancel
    }
  }

  modelInfo() {
    return new Promise((resolve, reject) => {
      const done = (error, answer) => (error ? reject(error) : resolve(answer));
      this.generation.GetModelInfo({}, done);
    });
  }
}

// The name of an error's status, its message and its details by type, for example
// {"google.rpc.BadRequest": {fieldViolations: [...]}}.
export function describe(error) {
  const details = {};
  for (const encoded of error.metadata?.get("grpc-status-details-bin") ?? []) {
    for (const any of rpc["google.rpc.Status"].deserialize(encoded).details) {
      const type = any.type_url.split("/").pop();
      details[type] = rpc[type]?.deserialize(any.value) ?? null;
    }
  }
  return { code: grpc.status[error.code], message: error.details, details };
}
