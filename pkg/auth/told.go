package auth

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
)

// TellEdges is what a cloud tells an edge with each certificate. The zero value says nothing.
type TellEdges struct {
	CloudCAs []byte   // the CAs by which the edge shall verify the cloud, for [ParseCloudCAs]
	Servers  []string // where the cloud can be reached, host:port; none, beside CloudCAs: no more those of before
}

const (
	// maxServers and maxServer bound the addresses that an edge takes from a cloud: a number, and bytes.
	maxServers = 16
	maxServer  = 262 // a DNS name, a colon and a port
	// maxTold bounds the file, in bytes.
	maxTold = 128 << 10
)

// Told is what an edge has taken of what its cloud told: CAs and addresses. They are in a file beside the edge's
// certificate.
//
// The operator's word stays above it. If the CAs that the configuration names change, the file no longer counts. The
// addresses of the configuration stay in use beside those of the file.
type Told struct {
	// Set once.
	file       string
	configured func() ([]byte, error) // reads the CAs of the configuration, in PEM
	host       string                 // to verify in the cloud's certificate
	log        *slog.Logger

	mu      sync.Mutex // guards the following
	base    *CloudCAs  // the CAs of the configuration, as last read
	pool    *x509.CertPool
	content toldFile  // what the file holds; it counts only while its Base is that of base
	cas     *CloudCAs // of content; nil: it does not count
	of      any       // what Roots was called with last
}

// toldFile is the content of the file.
type toldFile struct {
	Base    string   `json:"base"` // SHA-256 of the CAs of the configuration from which the edge has come to CAs
	CAs     string   `json:"cas"`  // PEM
	Servers []string `json:"servers,omitempty"`
	// TakenBack: the cloud has taken Servers back while the edge did not reach it by its configuration.
	TakenBack bool `json:"taken_back,omitempty"`
}

// ToldConfig configures a Told.
type ToldConfig struct {
	File string // need not exist
	CA   string // file with the CAs of the configuration
	Host string // the name to verify in the cloud's certificate
	Log  *slog.Logger
}

// NewTold reads the file. A file that is bad counts as none: then the configuration alone decides.
func NewTold(cfg ToldConfig) (*Told, error) {
	t := &Told{
		file: cfg.File, host: cfg.Host, log: cfg.Log,
		configured: func() ([]byte, error) { return os.ReadFile(cfg.CA) },
	}
	content, err := readTold(cfg.File)
	if err != nil {
		t.log.Warn("what the cloud has told cannot be used; the configuration counts alone", "target", cfg.File, "err", err)
	}
	t.content = content
	return t, t.readBase()
}

// readTold reads the file at path. A file that does not exist is no error.
func readTold(path string) (toldFile, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return toldFile{}, nil
	}
	if err != nil {
		return toldFile{}, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxTold+1))
	if err != nil {
		return toldFile{}, err
	}
	return parseTold(text)
}

// parseTold parses the file.
func parseTold(text []byte) (toldFile, error) {
	var content toldFile
	if len(text) > maxTold {
		return content, fmt.Errorf("it is longer than %d bytes", maxTold)
	}
	if err := json.Unmarshal(text, &content); err != nil {
		return toldFile{}, err
	}
	if _, err := ParseCloudCAs([]byte(content.CAs)); err != nil {
		return toldFile{}, err
	}
	if err := checkServers(content.Servers); err != nil {
		return toldFile{}, err
	}
	return content, nil
}

// checkServers returns an error for addresses that an edge does not take. An edge takes no URL: by one, a cloud
// could choose a request to another server.
func checkServers(servers []string) error {
	if len(servers) > maxServers {
		return fmt.Errorf("%d addresses of the cloud; %d are allowed", len(servers), maxServers)
	}
	for _, s := range servers {
		host, port, err := net.SplitHostPort(s)
		n, bad := strconv.ParseUint(port, 10, 16)
		if err != nil || bad != nil || n == 0 || len(s) > maxServer || !isHost(host) {
			return errors.New("an address of the cloud is not host:port")
		}
	}
	return nil
}

// readBase reads the CAs of the configuration. The caller holds mu, or nobody else has t yet.
func (t *Told) readBase() error {
	text, err := t.configured()
	if err != nil {
		return err
	}
	all, err := ParseCertificates(text)
	if err != nil {
		return err
	}
	t.base, t.cas = &CloudCAs{cas: all}, nil
	if t.content.Base == t.base.sum() {
		t.cas, _ = ParseCloudCAs([]byte(t.content.CAs)) // it was parsed before
	}
	t.pool = t.trustedLocked().Pool()
	return nil
}

// sum identifies the CAs.
func (c *CloudCAs) sum() string {
	h := sha256.New()
	for _, ca := range c.cas {
		h.Write(ca.Raw)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// trustedLocked returns the CAs that count now. The caller holds mu.
func (t *Told) trustedLocked() *CloudCAs {
	if t.cas != nil {
		return t.cas
	}
	return t.base
}

// Trusted returns the CAs by which the edge verifies the cloud now.
func (t *Told) Trusted() []*x509.Certificate {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trustedLocked().cas
}

// IDs returns the CAID of each CA that counts now.
func (t *Told) IDs() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trustedLocked().IDs()
}

// Roots returns the CAs that count now. version is another value whenever the CAs of the configuration have changed.
func (t *Told) Roots(version any) *x509.CertPool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of != version {
		if t.of != nil {
			if err := t.readBase(); err != nil {
				t.log.Error("the CAs of the cloud cannot be read again", "err", err)
			}
		}
		t.of = version
	}
	return t.pool
}

// Servers returns the addresses that the cloud has told, and that count now. takenBack: the cloud has taken them back,
// so those of the configuration come first.
func (t *Told) Servers() (servers []string, takenBack bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cas == nil {
		return nil, false
	}
	return slices.Clone(t.content.Servers), t.content.TakenBack
}

// Take stores what a cloud that has shown chain has told. It keeps what it has if the cloud tells nothing, or nothing
// that is good: then a log line says why. A cloud that tells good CAs and no addresses takes back the addresses of
// before. Unless asConfigured says that the edge reaches the cloud by its configuration, they stay behind those of the
// configuration: there may be no other way to the cloud. cas and servers say what has changed. An error is about the
// file; then nothing has changed.
func (t *Told) Take(
	told TellEdges, chain []*x509.Certificate, asConfigured bool,
) (cas, servers bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var next toldFile
	if t.cas != nil {
		next = t.content
	}
	trusted, takesBack := t.trustedLocked(), false
	if len(told.CloudCAs) > 0 {
		adopted, bad := t.adoptLocked(told.CloudCAs, chain)
		if bad != nil {
			t.log.Warn("the edge does not take the CAs that the cloud tells; they stay as they were", "err", bad)
		} else {
			cas, trusted = !adopted.Equal(trusted), adopted
			takesBack = len(told.Servers) == 0 && len(next.Servers) > 0
		}
	}
	switch bad := checkServers(told.Servers); {
	case bad != nil:
		t.log.Warn("the edge does not take the addresses that the cloud tells; they stay as they were", "err", bad)
	case takesBack && !asConfigured:
		servers, next.TakenBack = !next.TakenBack, true
	case takesBack || len(told.Servers) > 0:
		servers = next.TakenBack || !slices.Equal(told.Servers, next.Servers)
		next.Servers, next.TakenBack = slices.Clone(told.Servers), false
	}
	if cas || servers {
		next.Base, next.CAs = t.base.sum(), string(trusted.PEM())
		if err = writeTold(t.file, next); err != nil {
			return false, false, err
		}
		t.content, t.cas = next, trusted
		t.pool = trusted.Pool()
	}
	return cas, servers, nil
}

// adoptLocked returns the CAs that count from now on. The caller holds mu.
func (t *Told) adoptLocked(text []byte, chain []*x509.Certificate) (*CloudCAs, error) {
	told, err := ParseCloudCAs(text)
	if err != nil {
		return nil, err
	}
	next, unproven, err := t.trustedLocked().Adopt(told, chain, t.host, time.Now())
	for _, ca := range unproven {
		t.log.Warn("the cloud tells a CA that no CA which this edge trusts has signed; the edge does not take it",
			"target", nameOfCA(ca))
	}
	return next, err
}

// WriteTold writes the file of an edge that trusts the one CA of its join token, with what the cloud has told when
// the edge joined. Without anything to write it removes the file.
func WriteTold(path string, ca []byte, host string, told TellEdges, chain []*x509.Certificate, log *slog.Logger) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	t := &Told{file: path, host: host, log: log, configured: func() ([]byte, error) { return ca, nil }}
	if err := t.readBase(); err != nil {
		return err
	}
	_, _, err := t.Take(told, chain, false)
	return err
}

// writeTold replaces the file at path.
func writeTold(path string, content toldFile) error {
	text, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return err
	}
	if err = WriteSecretFile(path, append(text, '\n')); err != nil {
		return fmt.Errorf("writing what the cloud has told: %w", err)
	}
	return nil
}

// nameOfCA names a CA for people.
func nameOfCA(ca *x509.Certificate) string { return ca.Subject.CommonName + " " + CAID(ca) }
