package demo

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"tunnel.example/tunnel/pkg/auth"
)

// configure writes certificates, the token and both configuration files, and chooses ports.
func (d *demo) configure() error {
	loopback := []net.IP{net.IPv4(127, 0, 0, 1)}
	for name, pair := range map[string]auth.Leaf{
		"cloud":  {CommonName: cloudName, DNSNames: []string{cloudName}, IPs: loopback, Server: true},
		"https":  {CommonName: "tunnel", DNSNames: []string{nodeName, "localhost"}, IPs: loopback, Server: true},
		"client": {CommonName: "kube-apiserver-kubelet-client", Client: true},
	} {
		cert, key, err := d.ca.Issue(pair)
		if err != nil {
			return err
		}
		if err := errors.Join(d.write(name+".crt", cert), d.write(name+".key", key)); err != nil {
			return err
		}
	}
	nodes, err := auth.NewCA("tunnel demo nodes", lifetime)
	if err != nil {
		return err
	}
	token := auth.NewToken()
	if err := errors.Join(
		d.write("ca.crt", d.ca.CertPEM()),
		d.write("nodes-ca.crt", nodes.CertPEM()),
		d.write("nodes-ca.key", nodes.KeyPEM()),
		d.write("tokens", []byte(nodeName+":"+token.Hashed()+"\n")),
		d.write("token", []byte(token.Reveal()+"\n")),
	); err != nil {
		return err
	}
	if err := freePorts(&d.grpc, &d.log, &d.edgeLog, &d.https, &d.tcp, &d.own); err != nil {
		return err
	}
	values := d.values()
	return errors.Join(
		d.write("cloud.toml", []byte(values.Replace(cloudTOML))),
		d.write("edge.toml", []byte(values.Replace(edgeTOML))),
	)
}

// values replaces the names in braces in the configuration files.
func (d *demo) values() *strings.Replacer {
	ownPort, allow := "", `"self:*"`
	if d.flags.Target != "" {
		ownPort = fmt.Sprintf(`"127.0.0.1:%d" = "edge1/%s"`, d.own, d.flags.Target)
	}
	for _, a := range d.allow {
		allow += fmt.Sprintf(`, "%s"`, a)
	}
	return strings.NewReplacer(
		"{GRPC}", strconv.Itoa(d.grpc), "{Log}", strconv.Itoa(d.log), "{EdgeLog}", strconv.Itoa(d.edgeLog),
		"{HTTPS}", strconv.Itoa(d.https), "{TCP}", strconv.Itoa(d.tcp),
		"{Page}", d.page, "{Echo}", d.echo, "{OwnPort}", ownPort, "{Allow}", allow,
	)
}

const cloudTOML = `[mode.cloud.stream.server]
grpcport = {GRPC}
cert = "cloud.crt"
key = "cloud.key"
tokenfile = "tokens"
logport = {Log}
[mode.cloud.stream.dns]
debug = true
[mode.cloud.join]
ca = "nodes-ca.crt"
cakey = "nodes-ca.key"
address = "127.0.0.1:{GRPC}"
cloudca = "ca.crt"
[mode.cloud.tcp]
"127.0.0.1:{TCP}" = "edge1/{Echo}"
{OwnPort}
[mode.cloud.https]
listen = "127.0.0.1"
cert = "https.crt"
key = "https.key"
clientca = "ca.crt"
[mode.cloud.https.addr]
"{HTTPS}" = "{Page}"
[mode.cloud.https.kubelet]
cert = "client.crt"
key = "client.key"
ca = "ca.crt"
`

const edgeTOML = `[mode.edge]
node = "edge1"
allow = [{Allow}]
[mode.edge.stream.client]
servername = "127.0.0.1:{GRPC}"
dns = "tunnel.cloud.io"
cert = "ca.crt"
tokenfile = "token"
logport = {EdgeLog}
`

func (d *demo) path(name string) string { return filepath.Join(d.dir, name) }

func (d *demo) write(name string, data []byte) error {
	return os.WriteFile(d.path(name), data, 0o600)
}

// The demo's ports are below 32768, where the kernel's ports for outgoing connections
// begin. Else an outgoing connection could take a port between its choice and its use.
// The ports of tests are below 25000 (test/rig), so that a demo takes none of theirs.
const (
	firstPort = 25000
	lastPort  = 32000
)

// freePorts chooses different ports on which no process listens now.
func freePorts(ports ...*int) error {
	for _, port := range ports {
		ln, err := listenAnywhere()
		if err != nil {
			return err
		}
		defer ln.Close() // after the last choice: the ports must differ
		*port = ln.Addr().(*net.TCPAddr).Port
	}
	return nil
}

// listenAnywhere listens on a free port of all interfaces, as the daemons will.
func listenAnywhere() (ln net.Listener, err error) {
	for range 100 {
		port := firstPort + rand.IntN(lastPort-firstPort) // a port number is no secret
		if ln, err = net.Listen("tcp", fmt.Sprintf(":%d", port)); err == nil {
			return ln, nil
		}
	}
	return nil, fmt.Errorf("looking for a free port between %d and %d: %w", firstPort, lastPort, err)
}
