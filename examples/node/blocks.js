// A client of the kvstore gateway in Node, made from proto/kvstore/v1/blocks.proto at run time.
//
//   npm install
//   node blocks.js ADDRESS          puts three blocks, gets them back, prints what it saw
//
// Shows what a client in any language must do: names of 32 bytes, chunks of at most 1 MiB, the
// checksum of a block in its last chunk, flow control in both directions, statuses of a put.
'use strict';

const crypto = require('node:crypto');
const { once } = require('node:events');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const { xxh3 } = require('@node-rs/xxhash');

const PROTO = path.join(__dirname, '../../proto/kvstore/v1/blocks.proto');
const CHUNK_BYTES = 1 << 20;
const STORED = ['PRESENT', 'STORED', 'WAITING'];

function connect(address, { token, credentials } = {}) {
  const definition = loader.loadSync(PROTO, { longs: String, enums: String, defaults: true });
  const { Blocks } = grpc.loadPackageDefinition(definition).kvstore.blocks.v1;
  const metadata = new grpc.Metadata();
  if (token) metadata.set('authorization', `Bearer ${token}`);
  return { stub: new Blocks(address, credentials ?? grpc.credentials.createInsecure()), metadata };
}

// A key of a namespace of one's own: any 32 bytes do, as long as everyone names a block alike.
function keyOf(namespace, key) {
  return crypto.createHash('sha256').update(namespace).update(key).digest();
}

// One status a block: 'STORED', 'PRESENT', ... `blocks` are Buffers of one size.
async function put(client, namespace, names, blocks, declare) {
  let call;
  const reply = new Promise((resolve, reject) => {
    call = client.stub.Put(client.metadata, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
  reply.catch(() => {}); // told below, also when a write fails first
  const send = async (chunk) => {
    if (!call.write(chunk)) await Promise.race([once(call, 'drain'), reply]);
  };
  await send({ header: { namespace, fingerprints: Buffer.concat(names), declare } });
  for (const [block, bytes] of blocks.entries()) {
    for (let offset = 0; offset < bytes.length; offset += CHUNK_BYTES) {
      const data = bytes.subarray(offset, offset + CHUNK_BYTES);
      const last = offset + data.length === bytes.length;
      await send({ block, offset, data, last, xxh3: last ? xxh3.xxh64(bytes).toString() : 0 });
    }
  }
  call.end();
  const { statuses, reason } = await reply;
  return { statuses: [...statuses].map((status) => PUT_STATUS[status]), reason };
}

const PUT_STATUS = [
  'NOT_SENT', 'PRESENT', 'STORED', 'NO_ROOM', 'NO_PARENT', 'DROPPED', 'REFUSED', 'WAITING',
];

// Buffers in the order of `names`, null for what is not there. Taken up again where it broke.
async function get(client, namespace, names, tries = 3) {
  const found = [];
  for (;;) {
    let pieces = [];
    try {
      const request = { namespace, fingerprints: Buffer.concat(names), firstBlock: found.length };
      for await (const chunk of client.stub.Get(request, client.metadata)) {
        if (chunk.missing) {
          found.push(null);
          continue;
        }
        pieces.push(chunk.data); // reading on is what lets the gateway send on
        if (!chunk.last) continue;
        const block = Buffer.concat(pieces);
        pieces = [];
        if (xxh3.xxh64(block) !== BigInt(chunk.xxh3)) throw new Error(`block ${chunk.block} is damaged`);
        found.push(block);
      }
      return found;
    } catch (error) {
      if (--tries === 0 || error.code !== grpc.status.UNAVAILABLE) throw error;
    }
  }
}

function ask(client, verb, request) {
  return new Promise((resolve, reject) => {
    client.stub[verb](request, client.metadata, (error, reply) =>
      error ? reject(error) : resolve(reply));
  });
}

async function main(address) {
  const client = connect(address);
  const namespace = crypto.randomBytes(32);
  const names = ['one', 'two', 'three'].map((key) => keyOf(namespace, key));
  const blocks = names.map(() => crypto.randomBytes((2 << 20) + 4096)); // three chunks each
  const layout = { blockTokens: 1, layers: 1, layerBytes: blocks[0].length, ranks: 1 };
  const declare = { kind: 'flat', layout, label: 'node example' };

  const stored = await put(client, namespace, names, blocks, declare);
  const absent = keyOf(namespace, 'nowhere');
  const found = await get(client, namespace, [...names, absent]);
  const { prefixBlocks } = await ask(client, 'Exists', {
    namespace,
    fingerprints: Buffer.concat(names),
  });
  console.log(JSON.stringify({
    allStored: stored.statuses.every((status) => STORED.includes(status)),
    sameBytes: blocks.every((block, at) => block.equals(found[at])),
    absentIsMissing: found[3] === null,
    prefixBlocks,
  }));
  client.stub.close();
}

module.exports = { connect, put, get, ask, keyOf, STORED };

if (require.main === module) {
  main(process.argv[2] ?? '127.0.0.1:7420').catch((error) => {
    console.error(String(error));
    process.exit(1);
  });
}
