// A reward worker in another language: it needs TCP and nothing of ours. Scores the length of each response.
// usage: node reward_worker.js URL RUN DURABLE
const net = require("net");

const [url, run, durable] = process.argv.slice(2);
const { hostname, port, username, password } = new URL(url);
const login = username ? { user: decodeURIComponent(username), pass: decodeURIComponent(password) } : {};
const inbox = `_INBOX.${run}.js-worker.${process.pid}`;
const socket = net.connect(Number(port), hostname);
let buffer = Buffer.alloc(0);

const publish = (subject, payload, { reply = "", headers = "" } = {}) => {
  const body = Buffer.from(payload);
  if (!headers) {
    socket.write(`PUB ${subject} ${reply} ${body.length}\r\n`);
  } else {
    const block = Buffer.from(`NATS/1.0\r\n${headers}\r\n\r\n`);
    socket.write(`HPUB ${subject} ${reply} ${block.length} ${block.length + body.length}\r\n`);
    socket.write(block);
  }
  socket.write(body);
  socket.write("\r\n");
};

const pull = () =>
  publish(`$JS.API.CONSUMER.MSG.NEXT.phy-${run}-work.${durable}`, '{"batch":1,"expires":20000000000}', { reply: inbox });

// the part of msgpack that a score request has
const unpack = (bytes) => {
  let at = 0;
  const take = (size) => bytes.subarray(at, (at += size));
  const uint = (size) => Number(BigInt("0x" + take(size).toString("hex")));
  const list = (size) => Array.from({ length: size }, value);
  const map = (size) => Object.fromEntries(Array.from({ length: size }, () => [value(), value()]));
  const text = (size) => take(size).toString("utf8");
  function value() {
    const kind = uint(1);
    if (kind < 0x80) return kind;
    if (kind < 0x90) return map(kind & 15);
    if (kind < 0xa0) return list(kind & 15);
    if (kind < 0xc0) return text(kind & 31);
    if (kind >= 0xe0) return kind - 256;
    if (kind >= 0xcc && kind <= 0xcf) return uint(1 << (kind - 0xcc));
    if (kind >= 0xd9 && kind <= 0xdb) return text(uint(1 << (kind - 0xd9)));
    if (kind === 0xdc || kind === 0xdd) return list(uint(2 << (kind - 0xdc)));
    if (kind === 0xde || kind === 0xdf) return map(uint(2 << (kind - 0xde)));
    if (kind === 0xcb) return take(8).readDoubleBE();
    if (kind >= 0xd0 && kind <= 0xd3) return take(1 << (kind - 0xd0)).readIntBE(0, Math.min(6, 1 << (kind - 0xd0)));
    return { 0xc0: null, 0xc2: false, 0xc3: true }[kind];
  }
  return value();
};

const score = (request, ack) => {
  const scores = request.items.map((item) => ({ index: item.index, part: item.part, reward: item.response.length }));
  const answer = JSON.stringify({ type: "scores_given", request_id: request.request_id, scores });
  publish(request.reply_to, answer, { headers: "Physarum-Type: scores_given\r\nContent-Type: application/json" });
  publish(ack, "+ACK");
  pull();
};

const next = () => {
  const end = buffer.indexOf("\r\n");
  if (end < 0) return false;
  const words = buffer.subarray(0, end).toString("latin1").split(" ");
  if (words[0] === "PING") socket.write("PONG\r\n");
  if (words[0] === "-ERR") console.error(words.join(" "));
  if (words[0] !== "MSG" && words[0] !== "HMSG") {
    buffer = buffer.subarray(end + 2);
    return true;
  }
  const size = Number(words[words.length - 1]);
  if (buffer.length < end + 2 + size + 2) return false;
  const headerSize = words[0] === "HMSG" ? Number(words[words.length - 2]) : 0;
  const payload = Buffer.from(buffer.subarray(end + 2 + headerSize, end + 2 + size));
  const hasReply = words.length === (words[0] === "HMSG" ? 6 : 5);
  buffer = buffer.subarray(end + 2 + size + 2);
  if (hasReply && words[3].startsWith("$JS.ACK.")) score(unpack(payload), words[3]);
  else pull(); // a status: the pull request has ended
  return true;
};

socket.on("data", (data) => {
  buffer = Buffer.concat([buffer, data]);
  while (next());
});
socket.on("error", (error) => process.exit(console.error(String(error)) || 1));
socket.write(`CONNECT ${JSON.stringify({ verbose: false, headers: true, protocol: 1, ...login })}\r\nSUB ${inbox} 1\r\n`);
pull();
