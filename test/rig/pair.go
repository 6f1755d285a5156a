package rig

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"
	"time"

	"tunnel.example/tunnel/internal/freeport"
	"tunnel.example/tunnel/pkg/auth"
)

const (
	// Node is the name of the node of every pair.
	Node = "edge1"
	// cloudName is the name in the cloud's certificate.
	cloudName = "tunnel.cloud.io"
	// certTTL is how long certificates are good for; no test takes so long.
	certTTL = 24 * time.Hour
)

// Config says what a pair is made of.
type Config struct {
	Binary    string            // the program, see Build
	Dir       string            // an empty folder, which the caller removes
	TCP       map[string]string // name of a front door → target, or node/target
	HTTPS     string            // target of the HTTPS front door; "" is none
	EdgeTLS   bool              // the edge, not the cloud, has the client certificate for that target
	CA        *auth.CA          // who signs; nil: a new one. The target of HTTPS needs it too
	Debug     bool              // log everything
	Token     auth.Secret       // of the node; "": a new one
	Others    []string          // nodes that may join besides, see Token
	Cloud     string            // more lines of cloud.toml: whole tables; {{.GRPC}} is the port
	Edge      string            // more lines of edge.toml
	Args      []string          // more arguments of both
	Nice      int               // priority of the cloud, as nice(1) has it
	CloudHost Host              // where the cloud runs; its front doors and its health port are on loopback there
	EdgeHost  Host              // where the edge runs
}

// Pair is a cloud and an edge, their files and their ports.
type Pair struct {
	// Set once.
	cfg   Config
	ca    *auth.CA
	token auth.Secret
	other map[string]auth.Secret // by node
	ports ports

	CloudLog, EdgeLog Log
}

type ports struct {
	GRPC, CloudLog, EdgeLog, HTTPS, Channelz int

	TCP map[string]int
}

// NewPair writes the files of a pair and chooses its ports. It starts nothing.
func NewPair(cfg Config) (*Pair, error) {
	p := &Pair{cfg: cfg, ca: cfg.CA, token: cmp.Or(cfg.Token, auth.NewToken()), other: make(map[string]auth.Secret)}
	for _, node := range cfg.Others {
		p.other[node] = auth.NewToken()
	}
	if p.ca == nil {
		ca, err := NewCA()
		if err != nil {
			return nil, err
		}
		p.ca = ca
	}
	if err := p.choosePorts(); err != nil {
		return nil, err
	}
	return p, errors.Join(p.Certify(p.ca), p.configure())
}

// NewCA makes an authority for a pair.
func NewCA() (*auth.CA, error) { return auth.NewCA("tunnel test", certTTL) }

func (p *Pair) choosePorts() error {
	p.ports.TCP = make(map[string]int)
	for _, port := range []*int{&p.ports.GRPC, &p.ports.CloudLog, &p.ports.EdgeLog, &p.ports.HTTPS, &p.ports.Channelz} {
		var err error
		if *port, err = freeport.New(); err != nil {
			return err
		}
	}
	for name := range p.cfg.TCP {
		port, err := freeport.New()
		if err != nil {
			return err
		}
		p.ports.TCP[name] = port
	}
	return nil
}

// Certify gives the cloud a certificate that ca has signed, in place of the one it
// has. The edge goes on trusting the pair's own authority.
func (p *Pair) Certify(ca *auth.CA) error {
	return issue(p.cfg.Dir, "cloud", ca, CloudLeaf())
}

// CloudLeaf is what stands in a cloud's certificate.
func CloudLeaf() auth.Leaf {
	return auth.Leaf{CommonName: cloudName, DNSNames: []string{cloudName}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)},
		Server: true, Client: true}
}

// issue writes a certificate and its key to NAME.crt and NAME.key.
func issue(dir, name string, ca *auth.CA, leaf auth.Leaf) error {
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		return err
	}
	return write(dir, map[string]string{name + ".crt": string(cert), name + ".key": string(key)})
}

// CA returns the pair's own authority.
func (p *Pair) CA() *auth.CA { return p.ca }

// configure writes the files other than the cloud's certificate.
func (p *Pair) configure() error {
	files := map[string]string{"ca.crt": string(p.ca.CertPEM()), "token": p.token.Reveal() + "\n"}
	for name, leaf := range map[string]auth.Leaf{
		"https":  {CommonName: "tunnel", DNSNames: []string{Node}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true},
		"client": {CommonName: "kube-apiserver-kubelet-client", Client: true},
	} {
		if err := issue(p.cfg.Dir, name, p.ca, leaf); err != nil {
			return err
		}
	}
	data := struct {
		ports
		Targets     map[int]string // port → target
		HTTPSTarget string
		EdgeTLS     bool
		Cloud       string
	}{p.ports, make(map[int]string), p.cfg.HTTPS, p.cfg.EdgeTLS, p.GRPC()}
	for name, target := range p.cfg.TCP {
		if !strings.Contains(target, "/") {
			target = Node + "/" + target
		}
		data.Targets[p.ports.TCP[name]] = target
	}
	for name, text := range map[string][2]string{"cloud.toml": {cloudTOML, p.cfg.Cloud},
		"edge.toml": {edgeTOML, p.cfg.Edge}} {
		var err error
		if files[name], err = fill(text[0]+text[1], data); err != nil {
			return err
		}
	}
	return errors.Join(write(p.cfg.Dir, files), p.Allow(true))
}

// fill puts data into a template.
func fill(text string, data any) (string, error) {
	var b bytes.Buffer
	err := template.Must(template.New("file").Parse(text)).Execute(&b, data)
	return b.String(), err
}

// Allow writes the cloud's token file, with the node's token in it or without. As an
// operator's tool does, it replaces the file whole.
func (p *Pair) Allow(node bool) error {
	// Somebody else's line stands in it always: a file without any is an error.
	lines := "somebody-else:" + auth.NewToken().Hashed() + "\n"
	for other, token := range p.other {
		lines += other + ":" + token.Hashed() + "\n"
	}
	if node {
		lines += Node + ":" + p.token.Hashed() + "\n"
	}
	if err := write(p.cfg.Dir, map[string]string{"tokens.new": lines}); err != nil {
		return err
	}
	return os.Rename(p.Path("tokens.new"), p.Path("tokens"))
}

const cloudTOML = `[mode.cloud.stream.server]
grpcport = {{.GRPC}}
cert = "cloud.crt"
key = "cloud.key"
tokenfile = "tokens"
logport = {{.CloudLog}}
channelzaddr = "127.0.0.1:{{.Channelz}}"
[mode.cloud.stream.dns]
debug = true
[mode.cloud.tcp]
{{range $port, $target := .Targets}}"127.0.0.1:{{$port}}" = "{{$target}}"
{{end}}
{{if .HTTPSTarget}}
[mode.cloud.https]
listen = "127.0.0.1"
cert = "https.crt"
key = "https.key"
clientca = "ca.crt"
[mode.cloud.https.addr]
"{{.HTTPS}}" = "{{.HTTPSTarget}}"
{{if not .EdgeTLS}}
[mode.cloud.https.kubelet]
cert = "client.crt"
key = "client.key"
ca = "ca.crt"
{{end}}{{end}}`

const edgeTOML = `[mode.edge]
node = "edge1"
[mode.edge.stream.client]
servername = "{{.Cloud}}"
dns = "tunnel.cloud.io"
cert = "ca.crt"
tokenfile = "token"
logport = {{.EdgeLog}}
{{if .EdgeTLS}}
[mode.edge.https]
cert = "client.crt"
key = "client.key"
{{end}}`

// Path returns the path of one of the pair's files.
func (p *Pair) Path(name string) string { return filepath.Join(p.cfg.Dir, name) }

// Door returns the address of a TCP front door.
func (p *Pair) Door(name string) string { return address(p.ports.TCP[name]) }

// HTTPSDoor returns the address of the HTTPS front door.
func (p *Pair) HTTPSDoor() string { return address(p.ports.HTTPS) }

// CloudHealth returns the address of the cloud's logport.
func (p *Pair) CloudHealth() string { return address(p.ports.CloudLog) }

// Channelz returns the address of the cloud's channelz.
func (p *Pair) Channelz() string { return address(p.ports.Channelz) }

// EdgeHealth returns the address of the edge's logport.
func (p *Pair) EdgeHealth() string { return address(p.ports.EdgeLog) }

func address(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }

// StartCloud starts the cloud.
func (p *Pair) StartCloud() (*Process, error) { return p.start(&p.CloudLog, "cloud") }

// StartEdge starts the edge.
func (p *Pair) StartEdge() (*Process, error) { return p.start(&p.EdgeLog, "edge") }

func (p *Pair) start(log *Log, mode string) (*Process, error) {
	args := []string{mode, "-c", p.Path(mode + ".toml")}
	if p.cfg.Debug {
		args = append(args, "--log-level", "debug")
	}
	args = append(args, p.cfg.Args...)
	host := p.cfg.CloudHost
	if mode == "edge" {
		host = p.cfg.EdgeHost
	}
	if mode == "cloud" && p.cfg.Nice != 0 {
		return StartIn(host.Network, log, "nice", append([]string{"-n", strconv.Itoa(p.cfg.Nice), p.cfg.Binary}, args...)...)
	}
	return StartIn(host.Network, log, p.cfg.Binary, args...)
}

// Token returns the token of the node, or of one of the others.
func (p *Pair) Token(node string) auth.Secret {
	if node == Node {
		return p.token
	}
	return p.other[node]
}

// Leaks returns where the pair's token shows: in a log, a command line, or what the
// health port tells everybody. The processes may be nil.
func (p *Pair) Leaks(cloud, edge *Process) (where []string) {
	texts := map[string]string{"log of the cloud": p.CloudLog.String(), "log of the edge": p.EdgeLog.String()}
	for name, side := range map[string]struct {
		process *Process
		health  string
	}{"cloud": {cloud, p.CloudHealth()}, "edge": {edge, p.EdgeHealth()}} {
		if side.process == nil {
			continue
		}
		for _, path := range []string{"/metrics", "/readyz?verbose"} {
			text, err := fetch(side.health, path)
			if err != nil {
				text = "" // it is down
			}
			texts[path+" of the "+name] = text
		}
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", side.process.PID()))
		if err == nil {
			texts["command line of the "+name] = string(line)
		}
	}
	for place, text := range texts {
		for _, secret := range forms(Node, p.token) {
			if strings.Contains(text, secret) {
				where = append(where, place)
			}
		}
	}
	return where
}

// forms returns what a node's token looks like in a file, on the wire, and hashed.
func forms(node string, token auth.Secret) []string {
	return []string{token.Reveal(), auth.EncodeToken(node, token), strings.TrimPrefix(token.Hashed(), "sha256:")}
}
