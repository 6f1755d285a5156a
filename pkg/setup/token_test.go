package setup

import (
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// newSite makes a cloud's folder, and returns its configuration.
func newSite(t *testing.T) (dir string, c *conf.Cloud) {
	t.Helper()
	dir = t.TempDir()
	if err := Init(t.Context(), newInit(dir)); err != nil {
		t.Fatal(err)
	}
	c, err := conf.LoadCloud(filepath.Join(dir, "cloud.toml"), conf.Env{})
	if err != nil {
		t.Fatal(err)
	}
	return dir, c
}

// The token that the edge gets and the line that the cloud reads fit each other.
func TestCreateToken(t *testing.T) {
	dir, c := newSite(t)
	created, err := CreateToken(c, Host{}, "edge1", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	token, err := auth.ParseJoinToken(created.Token)
	if err != nil {
		t.Fatal(err)
	}
	cas, err := readCertificates("ca", filepath.Join(dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	if token.Address != "tunnel.example.com:9000" || token.ServerName != "tunnel.example.com" ||
		token.Node != "edge1" || token.CA != sha256.Sum256(cas[0].Raw) {
		t.Errorf("the token holds %+v", token)
	}
	lines, err := ListTokens(c)
	if err != nil || len(lines) != 1 {
		t.Fatal(lines, err)
	}
	if l := lines[0]; l.ID != created.ID || l.Node != "edge1" || l.Kind != string(auth.KindJoin) ||
		!l.Expires.Equal(created.Expires) {
		t.Errorf("the token file has %+v for %+v", l, created)
	}
	content, err := os.ReadFile(c.Server.TokenFile)
	if err != nil || strings.Contains(string(content), token.Secret.Reveal()) {
		t.Errorf("the token file holds the secret itself, or cannot be read: %v", err)
	}
	if !created.Written || created.Unwritten() != nil {
		t.Error("the token is in the file, and counts as not written")
	}
}

// Each error says whether the command line or the configuration is to be corrected. None of
// them changes the token file.
func TestCreateTokenErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		node   tunnel.NodeName
		change func(*conf.Cloud)
		kind   Kind
		want   string
	}{
		"a name of Kubernetes": {"kubernetes.default.svc", func(*conf.Cloud) {}, KindUsage, "--node"},
		"no signer":            {"edge1", func(c *conf.Cloud) { c.Join.CAKey = "" }, KindConfig, "gives no certificates"},
		"no address":           {"edge1", func(c *conf.Cloud) { c.Join.Address = "" }, KindConfig, "address is missing"},
		"another name": {
			"edge1", func(c *conf.Cloud) { c.Join.Address = "x.example:9000" }, KindConfig, "not made out to x.example",
		},
		"another authority": {"edge1", func(c *conf.Cloud) { c.Join.CloudCA = c.Join.CA }, KindConfig, "not signed by"},
		"a bad token file": {"edge1", func(c *conf.Cloud) {
			if err := os.WriteFile(c.Server.TokenFile, []byte("junk\n"), 0o600); err != nil {
				panic(err)
			}
		}, KindFailed, "line 1"},
	} {
		_, c := newSite(t)
		tt.change(c)
		before, err := os.ReadFile(c.Server.TokenFile)
		if err != nil {
			t.Fatal(err)
		}
		_, err = CreateToken(c, Host{}, tt.node, time.Hour)
		if err == nil || !strings.Contains(err.Error(), tt.want) || kindOf(err) != tt.kind {
			t.Errorf("%s: %v, kind %d; want %q and kind %d", name, err, kindOf(err), tt.want, tt.kind)
		}
		if after, err := os.ReadFile(c.Server.TokenFile); err != nil || string(after) != string(before) {
			t.Errorf("%s: the token file has changed, or cannot be read: %v", name, err)
		}
	}
}

func kindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	return KindFailed
}

// A token file that a Secret provides stays. The instructions have the line, the key, and the
// namespace in which the cloud runs, and no secret.
func TestCreateTokenUnwritten(t *testing.T) {
	for namespace, want := range map[string]string{"": "NS=tunnel-system ", "edges": "NS=edges "} {
		dir, c := newSite(t)
		if err := os.Rename(filepath.Join(dir, "tokens"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("..data", filepath.Join(dir, "tokens")); err != nil {
			t.Fatal(err)
		}
		created, err := CreateToken(c, Host{Env: conf.Env{PodNamespace: namespace}}, "edge1", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if created.Written {
			t.Error("a symbolic link was replaced")
		}
		token, err := auth.ParseJoinToken(created.Token)
		if err != nil {
			t.Fatal(err)
		}
		text := created.Unwritten().Error()
		for _, s := range []string{"NOT changed", want, "{.data.tokens}", created.Lines[0], token.Secret.Hashed()} {
			if !strings.Contains(text, s) {
				t.Errorf("%s\nlacks %q", text, s)
			}
		}
		if strings.Contains(text, token.Secret.Reveal()) {
			t.Error("the instructions show the secret")
		}
	}
}

// Every kind of line has its row. A token in plain text has no ID: a short token could be found
// by its sum.
func TestListTokens(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	sum := auth.Secret("long enough to be hashed").Hashed()
	id := strings.TrimPrefix(sum, "sha256:")[:8]
	rows, err := listTokens("# who may join\n"+
		"edge1:plain\n"+
		"edge2:"+sum+"\n"+
		"edge3:"+sum+" join expires=2030-01-02T03:04:05Z\n"+
		"edge3:"+sum+" join expires=2030-01-02T03:04:06Z\n"+
		"edge4:revoked\nedge4:"+sum+"\n"+
		"edge5:revoked before=2029-12-31T00:00:00Z\nedge5:"+sum+"\n"+
		"default:"+sum+"\n"+
		"edge-*:"+sum+" join uses=2 expires=2030-01-02T03:05:00Z\n"+
		"edgy-*:"+sum+" join uses=10 expires=2030-01-02T03:05:00Z\n",
		map[string]auth.Used{id: {Count: 2, Last: time.Now().Add(-3 * time.Hour)}}, now)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rows {
		got = append(got, strings.Join([]string{r.Node, r.Kind, r.ID, r.State}, "|"))
	}
	want := []string{
		"edge1|token, not hashed||good",
		"edge2|token|" + id + "|good",
		"edge3|join token|" + id + "|expired", // the time of expiry itself is too late
		"edge3|join token|" + id + "|good",
		"edge4|revocation||nothing proves this node",
		"edge4|token|" + id + "|revoked",
		"edge5|revocation||certificates from before 2029-12-31 00:00 UTC are bad",
		"edge5|token|" + id + "|good",
		"default|shared|" + id + "|good",
		"edge-*|join token|" + id + "|used up",
		"edgy-*|join token|" + id + "|good",
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	var table strings.Builder
	if err := PrintTokens(&table, new(conf.Cloud), "", rows); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(table.String(), "plain") {
		t.Errorf("the table shows a token:\n%s", &table)
	}
	if !strings.Contains(table.String(), "used 2 of 10, last 3 h ago") {
		t.Errorf("the table does not say how often a token was used:\n%s", &table)
	}
	if strings.Count(table.String(), "never") != 5 || strings.Count(table.String(), "2030-01-02 03:04 UTC") != 2 {
		t.Errorf("the times are wrong:\n%s", &table)
	}
}

func TestSpell(t *testing.T) {
	for d, want := range map[time.Duration]string{
		24 * time.Hour: "24h", 90 * time.Minute: "1h30m", 10 * time.Minute: "10m", time.Minute: "1m", 20 * time.Minute: "20m",
		time.Second: "1s", 10 * time.Second: "10s", 61 * time.Second: "1m1s", time.Hour + time.Second: "1h0m1s",
		1499 * time.Millisecond: "1s", 0: "0s", 10 * time.Hour: "10h",
	} {
		if got := Spell(d); got != want {
			t.Errorf("%d ns is %s, want %s", d, got, want)
		}
	}
}

func TestReadNodes(t *testing.T) {
	got, err := ReadNodes(strings.NewReader("# site\n edge1 \n\nedge2\r\n"))
	if err != nil || !slices.Equal(got, []tunnel.NodeName{"edge1", "edge2"}) {
		t.Errorf("%q, %v", got, err)
	}
	for _, text := range []string{
		"", "# none\n", "edge1\nedge1\n", "Edge1\n", "default\n", "localhost\n", "10.0.0.1\n", "edge1 # one\n",
	} {
		if got, err := ReadNodes(strings.NewReader(text)); err == nil {
			t.Errorf("%q: %q", text, got)
		}
	}
}

// Tokens for many nodes are written at once. Each has the lines that it needs.
func TestCreateTokens(t *testing.T) {
	_, c := newSite(t)
	if err := os.WriteFile(c.Server.TokenFile, []byte("edge2:revoked\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := CreateTokens(c, Host{}, []tunnel.NodeName{"edge1", "edge2"}, time.Hour)
	if err != nil || len(all) != 2 || len(all[0].Lines) != 1 || len(all[1].Lines) != 2 ||
		!strings.HasPrefix(all[1].Lines[0], "edge2:revoked before=") || !all[1].Written || all[0].Token == all[1].Token {
		t.Fatalf("%+v, %v", all, err)
	}
	text, err := os.ReadFile(c.Server.TokenFile)
	if err != nil || strings.Count(string(text), "\n") != 3 {
		t.Errorf("%q, %v", text, err)
	}
	var out, notes strings.Builder
	if err = ExplainTokens(all, &out, &notes); err != nil || strings.Count(out.String(), "\n") != 2 ||
		!strings.HasPrefix(out.String(), "edge1 tunnel1.") || strings.Contains(notes.String(), "tunnel1.") {
		t.Errorf("%v\n%s\n%s", err, &out, &notes)
	}
}

// Where a cloud cannot count uses, there is no token for several nodes.
func TestCreateSharedToken(t *testing.T) {
	_, c := newSite(t)
	made, err := CreateSharedToken(c, Host{}, "edge-*", 3, time.Hour)
	if err != nil || made.Uses != 3 || len(made.Lines) != 1 || !strings.Contains(made.Lines[0], " join uses=3 expires=") {
		t.Fatalf("%+v, %v", made, err)
	}
	token, err := auth.ParseJoinToken(made.Token)
	if err != nil || token.Nodes != "edge-*" || token.Node != "" {
		t.Errorf("%+v, %v", token, err)
	}
	inventory := c.Inventory
	c.Inventory = ""
	if _, err := CreateSharedToken(c, Host{}, "edge-*", 3, time.Hour); kindOf(err) != KindConfig {
		t.Errorf("without an inventory: %v", err)
	}
	c.Inventory = inventory
	if err := os.Rename(c.Server.TokenFile, c.Server.TokenFile+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(c.Server.TokenFile+".real", c.Server.TokenFile); err != nil {
		t.Fatal(err)
	}
	if _, err := CreateSharedToken(c, Host{}, "edge-*", 3, time.Hour); !errors.Is(err, errMounted) {
		t.Errorf("beside a mounted file: %v", err)
	}
}
