package auth

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// cloudOf returns the chain of a cloud whose certificate a CA has signed.
func cloudOf(t testing.TB, ca *CA) []*x509.Certificate {
	t.Helper()
	text, _, err := ca.Issue(Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	return must(ParseCertificates(text))
}

// newCA returns a CA that is good for an hour.
func newCA(t testing.TB) *CA {
	t.Helper()
	ca, err := NewCA("cloud CA", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// only returns the CAs without successions.
func only(cas ...*CA) *CloudCAs {
	c := new(CloudCAs)
	for _, ca := range cas {
		c.cas = append(c.cas, ca.cert)
	}
	return c
}

// succeed is Succeed, by a CA that is the last of c.
func succeed(t testing.TB, c *CloudCAs, old, next *CA) *CloudCAs {
	t.Helper()
	both, err := c.Succeed(old, next.cert)
	if err != nil {
		t.Fatal(err)
	}
	return must(ParseCloudCAs(both.PEM())) // as a file has them
}

// What an edge trusts after its cloud has told CAs.
func TestAdoptCAs(t *testing.T) {
	a, b, c, evil := newCA(t), newCA(t), newCA(t), newCA(t)
	ab := succeed(t, only(a), a, b)
	abc := succeed(t, ab, b, c)
	forged, err := only(evil).Succeed(evil, b.cert) // signed by a CA that nobody trusts
	if err != nil {
		t.Fatal(err)
	}
	forged.cas = []*x509.Certificate{a.cert, b.cert}
	stolen := &CloudCAs{[]*x509.Certificate{a.cert, evil.cert}, ab.successions} // the succession of another CA
	byB, err := abc.Succeed(b, evil.cert)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		have   *CloudCAs
		told   *CloudCAs
		signed *CA // who signed the cloud's certificate
		want   []*CA
		fails  bool
	}{
		"nothing new":                      {only(a), only(a), a, []*CA{a}, false},
		"a successor":                      {only(a), ab, a, []*CA{a, b}, false},
		"the successor of a successor":     {only(a), abc, a, []*CA{a, b, c}, false},
		"the old one stays in use":         {only(a, b), ab, b, []*CA{a, b}, false},
		"the old one goes":                 {only(a, b), only(b), b, []*CA{b}, false},
		"the one in use stays":             {only(a), only(b), a, []*CA{a}, false},
		"the next one stays":               {only(a, b), only(a), a, []*CA{a, b}, false},
		"neither goes while the old signs": {only(a, b), only(evil), a, []*CA{a, b}, false},
		"no succession":                    {only(a), only(a, evil), a, []*CA{a}, false},
		"a forged succession":              {only(a), forged, a, []*CA{a}, false},
		"another's succession":             {only(a), stolen, a, []*CA{a}, false},
		"by a CA that has gone":            {only(c), byB, c, []*CA{c}, false},
		"another cloud":                    {only(a), ab, evil, nil, true},
	} {
		next, _, err := tc.have.Adopt(tc.told, cloudOf(t, tc.signed), "cloud", time.Now())
		if tc.fails {
			if err == nil {
				t.Errorf("%s: %v", name, next.IDs())
			}
			continue
		}
		if err != nil || !slices.Equal(next.IDs(), only(tc.want...).IDs()) {
			t.Errorf("%s: %v, want %v: %v", name, next.IDs(), only(tc.want...).IDs(), err)
		}
	}
	if _, _, err := only(a).Adopt(ab, cloudOf(t, a), "other", time.Now()); err == nil {
		t.Error("a cloud with another name is believed")
	}
	next, unproven, err := only(a).Adopt(ab, cloudOf(t, a), "cloud", time.Now().Add(50*time.Minute))
	if err != nil || len(next.cas) != 2 || len(unproven) > 0 {
		t.Errorf("just before the end: %v, %v", next, err)
	}
	if _, err := only(a).Succeed(b, c.cert); err == nil {
		t.Error("a CA that is none of the cloud's has signed a succession")
	}
	if got := abc.Only(func(ca *x509.Certificate) bool { return !ca.Equal(a.cert) }); len(got.cas) != 2 ||
		len(got.successions) != 2 {
		t.Errorf("without the first: %d CAs, %d successions", len(got.cas), len(got.successions))
	}
}

// A thief of the old CA's key has planted CAs while edges trust the old CA. They go when the new CA signs. What the
// new CA itself announces stays, so that a stolen replica cannot remove it.
func TestPlantedCAGoes(t *testing.T) {
	a, b, c, evil, worse := newCA(t), newCA(t), newCA(t), newCA(t), newCA(t)
	ab := succeed(t, only(a), a, b)
	planted := succeed(t, succeed(t, only(a), a, evil), evil, worse)
	adopt := func(have, told *CloudCAs, signed *CA, want ...*CA) *CloudCAs {
		t.Helper()
		next, _, err := have.Adopt(told, cloudOf(t, signed), "cloud", time.Now())
		if err != nil || !slices.Equal(next.IDs(), only(want...).IDs()) {
			t.Fatalf("%v, want %v: %v", next.IDs(), only(want...).IDs(), err)
		}
		return must(ParseCloudCAs(next.PEM())) // as the edge's file has them
	}
	before := adopt(only(a), planted, a, a, evil, worse)
	adopt(adopt(before, ab, a, a, evil, worse, b), ab, b, a, b)
	after := adopt(adopt(only(a), ab, a, a, b), planted, a, a, b, evil, worse)
	after = adopt(after, ab, a, a, b, evil, worse) // nobody can tell yet which of them is the cloud's
	after = adopt(after, ab, b, a, b)
	after = adopt(after, ab.Only(b.cert.Equal), b, b)
	next := adopt(after, succeed(t, only(b), b, c), b, b, c)
	adopt(next, only(b), b, b, c)
	both := only(b, c) // the operator's own
	adopt(both, only(b), b, b, c)
}

// A leaf that the old CA has signed is no succession, whatever its name and key are.
func TestLeafIsNoSuccession(t *testing.T) {
	a, evil := newCA(t), newCA(t)
	leaf := cloudOf(t, a)[0]
	told := &CloudCAs{[]*x509.Certificate{a.cert, evil.cert, leaf}, []*x509.Certificate{leaf, evil.cert}}
	next, unproven, err := only(a).Adopt(told, cloudOf(t, a), "cloud", time.Now())
	if err != nil || len(next.cas) != 1 || len(unproven) != 2 {
		t.Errorf("%v, %d are unproven, %v", next.IDs(), len(unproven), err)
	}
}

func TestBadCloudCAs(t *testing.T) {
	ca := newCA(t)
	var many []byte
	for range maxCloudCAs + 1 {
		many = append(many, newCA(t).CertPEM()...)
	}
	for name, text := range map[string]string{
		"empty": "", "garbage": "garbage", "a key": string(ca.KeyPEM()), "many": string(many),
		"cut off": string(ca.CertPEM()) + string(newCA(t).CertPEM()[:100]),
		"long":    string(ca.CertPEM()) + strings.Repeat(" ", maxCloudCAsText),
		"no DER":  string(encodePEM("CERTIFICATE", []byte("garbage"))),
	} {
		if c, err := ParseCloudCAs([]byte(text)); err == nil {
			t.Errorf("%s: %v", name, c.IDs())
		}
	}
}

// toldOf returns a Told with files in a folder. The configuration has ca.
func toldOf(t *testing.T, dir string, ca *CA) (*Told, *testkit.Log) {
	t.Helper()
	file := filepath.Join(dir, "ca.crt")
	if err := os.WriteFile(file, ca.CertPEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	log, j := testkit.NewLog()
	told, err := NewTold(ToldConfig{File: filepath.Join(dir, "cloud.json"), CA: file, Host: "cloud", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return told, j
}

func serversOf(told *Told) []string {
	servers, _ := told.Servers()
	return servers
}

// An edge keeps what its cloud tells, also after a restart, until the operator names another CA.
func TestTold(t *testing.T) {
	dir := t.TempDir()
	a, b, other := newCA(t), newCA(t), newCA(t)
	told, _ := toldOf(t, dir, a)
	if ids := told.IDs(); !slices.Equal(ids, only(a).IDs()) || serversOf(told) != nil {
		t.Fatalf("at first: %v, %v", ids, serversOf(told))
	}
	ab := succeed(t, only(a), a, b)
	both := TellEdges{CloudCAs: ab.PEM(), Servers: []string{"new:9000"}}
	is, err := told.Take(both, cloudOf(t, a), true)
	if is != (Taken{CAs: true, Servers: true}) || err != nil {
		t.Fatalf("taken: %+v, %v", is, err)
	}
	is, err = told.Take(both, cloudOf(t, a), true)
	if is != (Taken{}) || err != nil {
		t.Errorf("the same again: %+v, %v", is, err)
	}
	if info, err := os.Stat(filepath.Join(dir, "cloud.json")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	told, _ = toldOf(t, dir, a)
	if !slices.Equal(told.IDs(), ab.IDs()) || !slices.Equal(serversOf(told), []string{"new:9000"}) {
		t.Errorf("after a restart: %v, %v", told.IDs(), serversOf(told))
	}
	if _, err := cloudOf(t, b)[0].Verify(x509.VerifyOptions{Roots: told.Roots(1)}); err != nil {
		t.Errorf("a cloud of the new CA: %v", err)
	}
	is, err = told.Take(TellEdges{CloudCAs: ab.PEM()}, cloudOf(t, a), true)
	if !is.Servers || err != nil || serversOf(told) != nil {
		t.Errorf("the cloud takes back its addresses: %+v, %v, %v", is, err, serversOf(told))
	}
	stolen := TellEdges{CloudCAs: ab.PEM(), Servers: []string{"stolen:9000"}}
	if _, err = told.Take(stolen, cloudOf(t, a), true); err != nil {
		t.Error(err)
	}
	if is, err = told.Take(TellEdges{}, cloudOf(t, a), true); is != (Taken{}) || err != nil {
		t.Errorf("an older cloud tells nothing: %+v, %v", is, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), other.CertPEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := cloudOf(t, b)[0].Verify(x509.VerifyOptions{Roots: told.Roots(2)}); err == nil {
		t.Error("the operator has named another CA, and the one of the cloud is still trusted")
	}
	if !slices.Equal(told.IDs(), only(other).IDs()) {
		t.Errorf("with another CA: %v", told.IDs())
	}
	if serversOf(told) != nil {
		t.Errorf("with another CA, the addresses are %v", serversOf(told))
	}
	tell := TellEdges{CloudCAs: only(other).PEM(), Servers: []string{"third:9000"}}
	if is, err := told.Take(tell, cloudOf(t, other), true); is.CAs || err != nil {
		t.Errorf("the other cloud: %+v, %v", is, err)
	}
	told, _ = toldOf(t, dir, other)
	if !slices.Equal(told.IDs(), only(other).IDs()) || !slices.Equal(serversOf(told), []string{"third:9000"}) {
		t.Errorf("after another restart: %v, %v", told.IDs(), serversOf(told))
	}
}

// Addresses that the cloud takes back stay behind those of the configuration until one of those has led to the cloud.
func TestToldTakenBack(t *testing.T) {
	dir := t.TempDir()
	a := newCA(t)
	told, _ := toldOf(t, dir, a)
	take := func(name string, tell TellEdges, asConfigured, changes bool, want []string, wantBack bool) {
		t.Helper()
		is, err := told.Take(tell, cloudOf(t, a), asConfigured)
		servers, back := told.Servers()
		if err != nil || is.Servers != changes || !slices.Equal(servers, want) || back != wantBack {
			t.Errorf("%s: %v, changed %+v, %v, taken back %t", name, err, is, servers, back)
		}
	}
	moved, old := []string{"new:9000"}, a.CertPEM()
	take("told", TellEdges{CloudCAs: old, Servers: moved}, false, true, moved, false)
	take("with a CA that the edge refuses", TellEdges{CloudCAs: []byte("garbage")}, true, false, moved, false)
	take("taken back, the only way", TellEdges{CloudCAs: old}, false, true, moved, true)
	take("once more", TellEdges{CloudCAs: old}, false, false, moved, true)
	told, _ = toldOf(t, dir, a)
	take("after a restart", TellEdges{CloudCAs: old}, false, false, moved, true)
	take("told again", TellEdges{CloudCAs: old, Servers: moved}, false, true, moved, false)
	take("taken back again", TellEdges{CloudCAs: old}, false, true, moved, true)
	take("the configuration leads to the cloud", TellEdges{CloudCAs: old}, true, true, nil, false)
	take("forgotten", TellEdges{CloudCAs: old}, false, false, nil, false)
}

// An edge keeps the CAs of nodes that the cloud has told, until it tells others, or the operator names another cloud.
func TestToldNodeCAs(t *testing.T) {
	dir := t.TempDir()
	a, nodes, next := newCA(t), newCA(t), newCA(t)
	told, _ := toldOf(t, dir, a)
	verifies := func(ca *CA) bool {
		pool, _ := told.NodeRoots()
		text, _, err := ca.Issue(Leaf{CommonName: "tunnel:node:edge1", Organization: []string{"tunnel:nodes"}, Client: true})
		if err != nil {
			t.Fatal(err)
		}
		_, err = VerifyNode(must(ParseCertificates(text)), pool)
		return err == nil
	}
	if _, known := told.NodeRoots(); known || verifies(nodes) {
		t.Error("an edge that was told nothing knows CAs of nodes")
	}
	if is, err := told.Take(TellEdges{NodeCAs: nodes.CertPEM()}, nil, true); is != (Taken{NodeCAs: true}) || err != nil {
		t.Errorf("the first: %+v, %v", is, err)
	}
	if is, err := told.Take(TellEdges{NodeCAs: nodes.CertPEM()}, cloudOf(t, a), true); is != (Taken{}) || err != nil {
		t.Errorf("the same again: %+v, %v", is, err)
	}
	told, _ = toldOf(t, dir, a)
	if _, known := told.NodeRoots(); !known || !verifies(nodes) || verifies(next) {
		t.Error("after a restart, the edge verifies other nodes")
	}
	both := append(append(nodes.CertPEM(), nodes.KeyPEM()...), next.CertPEM()...)
	if is, err := told.Take(TellEdges{NodeCAs: both}, nil, true); is != (Taken{NodeCAs: true}) || err != nil {
		t.Errorf("another CA: %+v, %v", is, err)
	}
	if is, err := told.Take(TellEdges{CloudCAs: a.CertPEM()}, cloudOf(t, a), true); is != (Taken{}) || err != nil {
		t.Errorf("a cloud that does not say: %+v, %v", is, err)
	}
	if !verifies(nodes) || !verifies(next) {
		t.Error("the edge does not verify nodes of both CAs")
	}
	if text, err := os.ReadFile(filepath.Join(dir, "cloud.json")); err != nil || strings.Contains(string(text), "KEY") {
		t.Errorf("the file has a key: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), next.CertPEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	told.Roots(1)
	told.Roots(2)
	if _, known := told.NodeRoots(); known || verifies(nodes) {
		t.Error("with another cloud in the configuration, the old CAs of nodes count")
	}
}

// What is bad changes nothing, and the log says so.
func TestToldGarbage(t *testing.T) {
	a := newCA(t)
	told, log := toldOf(t, t.TempDir(), a)
	for name, tell := range map[string]TellEdges{
		"nothing":         {},
		"garbage":         {CloudCAs: []byte("garbage")},
		"another CA":      {CloudCAs: newCA(t).CertPEM()},
		"a URL":           {Servers: []string{"https://cloud/path"}},
		"a WebSocket":     {Servers: []string{"wss://cloud/path"}},
		"no port":         {Servers: []string{"cloud"}},
		"a path":          {Servers: []string{"cloud:9000/path"}},
		"a line":          {Servers: []string{"cloud\n:9000"}},
		"many":            {Servers: slices.Repeat([]string{"cloud:9000"}, maxServers+1)},
		"a long address":  {Servers: []string{strings.Repeat("a.", 200) + "a:9000"}},
		"one bad of them": {Servers: []string{"cloud:9000", ":9000"}},
		"no CA of nodes":  {NodeCAs: []byte("garbage")},
		"many of nodes":   {NodeCAs: bytes.Repeat(a.CertPEM(), maxCloudCAs+1)},
		"long of nodes":   {NodeCAs: append(a.CertPEM(), make([]byte, maxCloudCAsText)...)},
	} {
		is, err := told.Take(tell, cloudOf(t, a), true)
		if is != (Taken{}) || err != nil || !slices.Equal(told.IDs(), only(a).IDs()) || serversOf(told) != nil {
			t.Errorf("%s: %+v, %v, %v, %v", name, is, err, told.IDs(), serversOf(told))
		}
	}
	if len(log.Lines("does not take")) < 12 {
		t.Errorf("the log:\n%s", log)
	}
	tell := TellEdges{CloudCAs: succeed(t, only(a), a, newCA(t)).PEM()}
	if is, err := told.Take(tell, nil, true); is.CAs || err != nil {
		t.Errorf("a cloud that has shown nothing: %+v, %v", is, err)
	}
}

// An edge whose configuration has many CAs, such as those of its system, keeps what the cloud tells.
func TestToldWithManyCAs(t *testing.T) {
	dir := t.TempDir()
	a := newCA(t)
	told, _ := toldOf(t, dir, a)
	all := a.CertPEM()
	for range maxCloudCAs {
		all = append(all, newCA(t).CertPEM()...)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), all, 0o600); err != nil {
		t.Fatal(err)
	}
	told.Roots(1)
	told.Roots(2)
	tell := TellEdges{Servers: []string{"new:9000"}, NodeCAs: newCA(t).CertPEM()}
	if is, err := told.Take(tell, cloudOf(t, a), true); is != (Taken{Servers: true, NodeCAs: true}) || err != nil {
		t.Fatalf("%+v, %v", is, err)
	}
	log, lines := testkit.NewLog()
	again, err := NewTold(ToldConfig{
		File: filepath.Join(dir, "cloud.json"), CA: filepath.Join(dir, "ca.crt"), Host: "cloud", Log: log,
	})
	if err != nil || len(again.NodeCAs()) != 1 || len(serversOf(again)) != 1 || len(again.IDs()) != maxCloudCAs+1 {
		t.Errorf("after a restart: %v\n%s", err, lines)
	}
}

// A file that cannot be written changes nothing. A file that cannot be read counts as none.
func TestToldFile(t *testing.T) {
	dir := t.TempDir()
	a := newCA(t)
	if err := os.MkdirAll(filepath.Join(dir, "cloud.json", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	told, log := toldOf(t, dir, a)
	if len(log.Lines("cannot be used")) != 1 {
		t.Errorf("the log:\n%s", log)
	}
	tell := TellEdges{
		CloudCAs: succeed(t, only(a), a, newCA(t)).PEM(), Servers: []string{"new:9000"}, NodeCAs: newCA(t).CertPEM(),
	}
	_, known := told.NodeRoots()
	if is, err := told.Take(tell, cloudOf(t, a), true); is != (Taken{}) || err == nil || len(told.IDs()) != 1 || known {
		t.Errorf("%+v, %v, %v, CAs of nodes %t", is, err, told.IDs(), known)
	}
}

// A node that joins while the CA changes has both from the start.
func TestWriteTold(t *testing.T) {
	dir := t.TempDir()
	a, b := newCA(t), newCA(t)
	log, _ := testkit.NewLog()
	file := filepath.Join(dir, "cloud.json")
	ab := succeed(t, only(a), a, b)
	if err := WriteTold(file, a.CertPEM(), "cloud", TellEdges{CloudCAs: ab.PEM()}, cloudOf(t, a), log); err != nil {
		t.Fatal(err)
	}
	if told, _ := toldOf(t, dir, a); !slices.Equal(told.IDs(), ab.IDs()) {
		t.Errorf("after the join: %v", told.IDs())
	}
	if err := WriteTold(file, a.CertPEM(), "cloud", TellEdges{CloudCAs: []byte("x")}, cloudOf(t, a), log); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("a file of an earlier join stays")
	}
}

func FuzzParseCloudCAs(f *testing.F) {
	a := newCA(f)
	f.Add(succeed(f, only(a), a, newCA(f)).PEM())
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseCloudCAs(text)
		if err != nil {
			return
		}
		again, err := ParseCloudCAs(c.PEM())
		if err != nil || !again.Equal(c) || len(c.cas) > maxCloudCAs {
			t.Fatalf("%v, %v", again, err)
		}
	})
}

func FuzzParseTold(f *testing.F) {
	a := newCA(f)
	text, err := json.Marshal(toldFile{Base: only(a).sum(), CAs: string(a.CertPEM()), Servers: []string{"cloud:9000"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		content, err := parseTold(text)
		if err != nil && !reflect.DeepEqual(content, toldFile{}) {
			t.Fatalf("a bad file has %+v", content)
		}
	})
}
