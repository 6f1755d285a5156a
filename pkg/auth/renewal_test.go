package auth

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// nodeFile writes the file of edge1, with a certificate that s has signed.
func nodeFile(t *testing.T, s Signer) string {
	t.Helper()
	key, request, err := NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	chain, err := s.Sign(t.Context(), "edge1", request)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.pem")
	if err := WriteNodeFile(path, chain, key); err != nil {
		t.Fatal(err)
	}
	return path
}

func leafOf(t *testing.T, path string) *x509.Certificate {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(path, path)
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf
}

// runRenewal runs a Renewal until the end of the test.
func runRenewal(
	t *testing.T, path string, renew func(ctx context.Context, request []byte) ([]byte, error), changed func(),
) (*Renewal, *testkit.Log) {
	t.Helper()
	log, j := testkit.NewLog()
	r := NewRenewal(RenewalConfig{Node: "edge1", File: path, Changed: changed, Log: log,
		Renew: func(ctx context.Context, request []byte) ([]byte, time.Time, error) {
			chain, err := renew(ctx, request)
			return chain, time.Now(), err
		}})
	testkit.Run(t, r.Run)
	return r, j
}

// The tests with synctest make their CA inside the bubble, so that it has the bubble's clock.
const days = 24 * time.Hour

func bubbleSigner(t *testing.T) *FileSigner {
	t.Helper()
	ca, err := NewCA("nodes", 1000*days)
	if err != nil {
		t.Fatal(err)
	}
	return fileSigner(t, ca, 30*days)
}

func TestRenewalAtTwoThirds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bubbleSigner(t)
		path := nodeFile(t, s)
		var mu sync.Mutex
		var at []time.Duration // of each renewal: time since the one before
		last, changes := time.Now(), 0
		r, _ := runRenewal(t, path, func(ctx context.Context, request []byte) ([]byte, error) {
			mu.Lock()
			defer mu.Unlock()
			at = append(at, time.Since(last))
			last = time.Now()
			return s.Sign(ctx, "edge1", request)
		}, func() { mu.Lock(); changes++; mu.Unlock() })
		old := leafOf(t, path)
		time.Sleep(17*days - time.Hour)
		if leafOf(t, path).SerialNumber.Cmp(old.SerialNumber) != 0 {
			t.Error("renewed long before two thirds")
		}
		time.Sleep(100 * days)
		mu.Lock()
		defer mu.Unlock()
		if len(at) < 5 || changes != len(at) {
			t.Fatalf("renewed %d times in 117 days, said so %d times", len(at), changes)
		}
		same := true
		for _, d := range at {
			if d < 17*days-2*time.Hour || d > 20*days+2*time.Hour {
				t.Errorf("renewed after %v", d)
			}
			same = same && d == at[0]
		}
		if same {
			t.Error("renewed without jitter")
		}
		now := leafOf(t, path)
		if old.PublicKey.(*ecdsa.PublicKey).Equal(now.PublicKey) || now.SerialNumber.Cmp(old.SerialNumber) == 0 {
			t.Error("the file holds the old certificate or its key")
		}
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", st.Mode(), err)
		}
		if r.Note() != "" {
			t.Errorf("note %q", r.Note())
		}
	})
}

func TestRenewalFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bubbleSigner(t)
		path := nodeFile(t, s)
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var at []time.Time
		down := true
		r, j := runRenewal(t, path, func(ctx context.Context, request []byte) ([]byte, error) {
			mu.Lock()
			defer mu.Unlock()
			at = append(at, time.Now())
			if down {
				return nil, errors.New("no session")
			}
			return s.Sign(ctx, "edge1", request)
		}, nil)
		time.Sleep(24 * days)
		mu.Lock()
		if len(at) < 100 {
			t.Fatalf("tried %d times", len(at))
		}
		for i, want := range []time.Duration{
			10 * time.Second, 20 * time.Second, 40 * time.Second, 80 * time.Second, 160 * time.Second,
			320 * time.Second, 10 * time.Minute, 10 * time.Minute,
		} {
			if got := at[i+1].Sub(at[i]); got != want {
				t.Errorf("wait %d was %v, want %v", i, got, want)
			}
		}
		mu.Unlock()
		if r.Note() != "" || !strings.Contains(r.Status(), "failed the last time") {
			t.Errorf("a fifth is left: note %q, status %q", r.Note(), r.Status())
		}
		time.Sleep(2 * days)
		if !strings.Contains(r.Note(), "could not be renewed") {
			t.Errorf("less than a sixth is left: note %q", r.Note())
		}
		if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
			t.Errorf("a failure has changed the file: %v", err)
		}
		if !strings.Contains(j.String(), "no session") || strings.Contains(j.String(), "PRIVATE") {
			t.Error("the log does not say why")
		}
		time.Sleep(5 * days)
		if !strings.Contains(r.Note(), "has expired") {
			t.Errorf("expired: note %q", r.Note())
		}
		mu.Lock()
		down = false
		mu.Unlock()
		time.Sleep(11 * time.Minute)
		if r.Note() != "" || !strings.HasPrefix(r.Status(), "the node's certificate is good until ") ||
			strings.Contains(r.Status(), "failed") {
			t.Errorf("renewed at last: note %q, status %q", r.Note(), r.Status())
		}
	})
}

// TestRenewalOfAnotherFile: if somebody replaces the certificate by one with a shorter life, the new
// one is renewed in time. If it cannot be written, the log says why.
func TestRenewalOfAnotherFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, err := NewCA("nodes", 1000*days)
		if err != nil {
			t.Fatal(err)
		}
		long, short := fileSigner(t, ca, 30*days), fileSigner(t, ca, 10*time.Minute)
		path := nodeFile(t, long)
		_, j := runRenewal(t, path, func(ctx context.Context, request []byte) ([]byte, error) {
			return short.Sign(ctx, "edge1", request)
		}, nil)
		time.Sleep(time.Minute)
		if err := os.Rename(nodeFile(t, short), path); err != nil {
			t.Fatal(err)
		}
		for range 60 {
			time.Sleep(time.Minute)
			if leaf := leafOf(t, path); time.Now().After(leaf.NotAfter) {
				t.Fatalf("it has expired at %v", leaf.NotAfter)
			}
		}
		// Root may write to a folder with any mode, so the folder itself is moved away.
		dir := filepath.Dir(path)
		if err := os.Rename(dir, dir+".away"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Minute)
		if !strings.Contains(j.String(), "tunnel join writes another") {
			t.Errorf("the log does not say what to do: %s", j)
		}
	})
}

func TestRenewalRefusesWrongCertificates(t *testing.T) {
	// signNew signs a request of node with a new key.
	signNew := func(node tunnel.NodeName) func(*testing.T, Signer, []byte) []byte {
		return func(t *testing.T, s Signer, _ []byte) []byte {
			_, request, err := NewRequest(node)
			if err != nil {
				t.Fatal(err)
			}
			chain, err := s.Sign(t.Context(), node, request)
			if err != nil {
				t.Fatal(err)
			}
			return chain
		}
	}
	for name, answer := range map[string]func(t *testing.T, s Signer, request []byte) []byte{
		"another node's": signNew("edge2"),
		"another key's":  signNew("edge1"),
		"nothing":        func(*testing.T, Signer, []byte) []byte { return nil },
		"garbage": func(*testing.T, Signer, []byte) []byte {
			return []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := bubbleSigner(t)
				path := nodeFile(t, s)
				before, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				_, j := runRenewal(t, path, func(_ context.Context, request []byte) ([]byte, error) {
					return answer(t, s, request), nil
				}, func() { t.Error("it says that the certificate is new") })
				time.Sleep(21 * days)
				if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
					t.Errorf("the file has changed: %v", err)
				}
				if !strings.Contains(j.String(), "the certificate from the cloud") {
					t.Error("the log does not say why")
				}
			})
		})
	}
}

func TestRenewalWhileCAExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, err := NewCA("nodes", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		s := fileSigner(t, ca, 30*days)
		path := nodeFile(t, s)
		var mu sync.Mutex
		n := 0
		runRenewal(t, path, func(ctx context.Context, request []byte) ([]byte, error) {
			mu.Lock()
			defer mu.Unlock()
			n++
			return s.Sign(ctx, "edge1", request)
		}, nil)
		time.Sleep(time.Hour - time.Minute)
		mu.Lock()
		defer mu.Unlock()
		if n == 0 || n > 30 {
			t.Errorf("renewed %d times in the last hour of the CA", n)
		}
	})
}

func TestWriteNodeFile(t *testing.T) {
	ca := newNodeCA(t)
	s := fileSigner(t, ca.CA, time.Hour)
	key, request, err := NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	chain, err := s.Sign(t.Context(), "edge1", request)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path, link := filepath.Join(dir, "real", "node.pem"), filepath.Join(dir, "node.pem")
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, path, "old")
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	const somebody = 12345
	root := os.Geteuid() == 0
	if root {
		if err := os.Chown(path, somebody, somebody); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := WriteNodeFile(link, chain, key); err != nil {
		t.Fatal(err)
	}
	if leafOf(t, path).Subject.CommonName != "tunnel:node:edge1" {
		t.Error("it holds another certificate")
	}
	st, err := os.Lstat(path)
	if err != nil || st.Mode() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if st, err := os.Lstat(link); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link was replaced: %v", err)
	}
	if uid := ownerOf(st); root && uid != somebody {
		t.Errorf("it belongs to %d", uid)
	}

	other, _, err := NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteNodeFile(link, chain, other); err == nil {
		t.Error("a key that does not fit is written")
	}
	if err := WriteNodeFile(filepath.Join(dir, "none", "node.pem"), chain, key); err == nil {
		t.Error("a directory that is not there")
	}
	for _, d := range []string{dir, filepath.Dir(path)} {
		entries, err := os.ReadDir(d)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".") {
				t.Errorf("%s is left behind", e.Name())
			}
		}
	}
}

// If root writes a node's certificate into a folder of another user, that user must not choose which
// other file is replaced or given away.
func TestWriteNodeFileInAnothersFolder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root writes to folders of others")
	}
	const somebody = 12345
	s := fileSigner(t, newNodeCA(t).CA, time.Hour)
	key, request, err := NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	chain, err := s.Sign(t.Context(), "edge1", request)
	if err != nil {
		t.Fatal(err)
	}
	for _, direct := range []bool{true, false} {
		dir := t.TempDir()
		shadow, theirs := filepath.Join(dir, "shadow"), filepath.Join(dir, "theirs")
		outer := filepath.Join(dir, "node.pem")
		path := filepath.Join(theirs, "node.pem")
		writeFile(t, shadow, "root's")
		if err := errors.Join(os.Mkdir(theirs, 0o700), os.Chown(theirs, somebody, somebody),
			os.Symlink(shadow, path), os.Symlink("theirs/node.pem", outer)); err != nil {
			t.Fatal(err)
		}
		to := path
		if !direct {
			to = outer
		}
		if err := WriteNodeFile(to, chain, key); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(shadow)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(shadow); err != nil || string(text) != "root's" || ownerOf(st) != 0 {
			t.Errorf("the link was followed: %q, owner %d, %v", text, ownerOf(st), err)
		}
		if st, err = os.Lstat(path); err != nil || st.Mode() != 0o600 || ownerOf(st) != somebody {
			t.Errorf("the certificate: %v, %v", st, err)
		}
	}
	loop := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink("loop", loop); err != nil {
		t.Fatal(err)
	}
	if err := WriteNodeFile(loop, chain, key); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a loop: %v", err)
	}
}

func ownerOf(st os.FileInfo) int { return int(st.Sys().(*syscall.Stat_t).Uid) }

// A renewal that is asked for comes within its time, and not too soon after the one before.
func TestRenewalAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bubbleSigner(t)
		var mu sync.Mutex
		var at []time.Time // of each renewal
		fails := false
		r, _ := runRenewal(t, nodeFile(t, s), func(ctx context.Context, request []byte) ([]byte, error) {
			mu.Lock()
			defer mu.Unlock()
			at = append(at, time.Now())
			if fails {
				return nil, errors.New("the cloud is away")
			}
			return s.Sign(ctx, "edge1", request)
		}, nil)
		renewals := func() []time.Time {
			mu.Lock()
			defer mu.Unlock()
			return at
		}
		synctest.Wait()
		if err := r.Now(t.Context()); err != nil || len(renewals()) != 1 {
			t.Fatalf("now: %d renewals, %v", len(renewals()), err)
		}
		for range 10 { // an impatient cloud
			r.Soon(0)
		}
		time.Sleep(minAskedInterval - time.Millisecond)
		if n := len(renewals()); n != 1 {
			t.Errorf("%d renewals at once", n)
		}
		time.Sleep(time.Hour)
		if n := len(renewals()); n < 2 || n > 3 {
			t.Errorf("%d renewals, want 2 or 3", n)
		}
		before, asked := len(renewals()), time.Now()
		r.Soon(time.Hour)
		time.Sleep(time.Hour + time.Second)
		if all := renewals(); len(all) != before+1 || all[before].Sub(asked) > time.Hour {
			t.Errorf("%d renewals, want one within the hour", len(all)-before)
		}
		before, asked = len(renewals()), time.Now()
		r.Soon(24 * time.Hour) // such a request does not hold up the next ones
		if err := r.Now(t.Context()); err != nil || !time.Now().Equal(asked) {
			t.Errorf("now, behind another request: after %s, %v", time.Since(asked), err)
		}
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				if err := r.Now(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		both.Wait()
		time.Sleep(24 * time.Hour)
		if n := len(renewals()); n != before+2 {
			t.Errorf("%d renewals for four requests, want 2", n-before)
		}
		mu.Lock()
		fails = true
		mu.Unlock()
		if err := r.Now(t.Context()); err == nil {
			t.Error("a renewal that failed is no error")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Now(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nobody waits any more: %v", err)
		}
	})
}

// A renewal that was asked for and fails is tried again, as the log says.
func TestRenewalAskedFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bubbleSigner(t)
		path := nodeFile(t, s)
		var mu sync.Mutex
		tries, down := 0, true
		count := func() int { mu.Lock(); defer mu.Unlock(); return tries }
		r, log := runRenewal(t, path, func(ctx context.Context, request []byte) ([]byte, error) {
			mu.Lock()
			defer mu.Unlock()
			tries++
			if down {
				return nil, errors.New("the cloud is away")
			}
			return s.Sign(ctx, "edge1", request)
		}, nil)
		synctest.Wait()
		if err := r.Now(t.Context()); err == nil {
			t.Fatal("a renewal that failed is no error")
		}
		time.Sleep(minRetryWait - time.Millisecond)
		if n := count(); n != 1 {
			t.Errorf("%d tries at once", n)
		}
		time.Sleep(2 * time.Millisecond)
		if n := count(); n != 2 || len(log.Lines("cannot renew")) != 2 {
			t.Errorf("%d tries after %v, want 2; the log:\n%s", n, minRetryWait, log)
		}
		// While the file is away, nothing can be renewed. The request stays.
		if err := os.Rename(path, path+".away"); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		down = false
		mu.Unlock()
		time.Sleep(time.Hour)
		if err := os.Rename(path+".away", path); err != nil || count() != 2 {
			t.Fatalf("%d tries without the file, %v", count(), err)
		}
		time.Sleep(maxRetryWait)
		if n := count(); n != 3 {
			t.Errorf("%d tries after the file is back, want 3", n)
		}
		time.Sleep(24 * time.Hour)
		if n := count(); n != 3 {
			t.Errorf("%d tries after the renewal, want 3", n)
		}
	})
}

// shifted returns a certificate that differs from the first of chain in its times, and in who has signed it.
func shifted(t *testing.T, chain []byte, by time.Duration) []byte {
	t.Helper()
	certificates, err := parseChain(chain)
	if err != nil {
		t.Fatal(err)
	}
	leaf := certificates[0]
	leaf.NotBefore, leaf.NotAfter = leaf.NotBefore.Add(by), leaf.NotAfter.Add(by)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, &x509.Certificate{Subject: leaf.Issuer}, leaf.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return encodePEM("CERTIFICATE", der)
}

// The cloud's clock decides whether a certificate is valid, so it decides when to renew, too.
func TestRenewalByTheCloudsClock(t *testing.T) {
	for name, ahead := range map[string]time.Duration{
		"this machine's stands behind":   20 * days,
		"this machine's stands in front": -40 * days,
	} {
		synctest.Test(t, func(t *testing.T) {
			s := bubbleSigner(t)
			path := nodeFile(t, s)
			log, j := testkit.NewLog()
			var renewals atomic.Int64
			r := NewRenewal(RenewalConfig{Node: "edge1", File: path, Log: log,
				Renew: func(ctx context.Context, request []byte) ([]byte, time.Time, error) {
					renewals.Add(1)
					now := time.Now().Add(ahead)
					chain, err := s.Sign(ctx, "edge1", request)
					if err != nil {
						return nil, now, err
					}
					return shifted(t, chain, ahead), now, nil
				}})
			testkit.Run(t, r.Run)
			r.Soon(0)
			time.Sleep(days)
			if n := renewals.Load(); n != 1 {
				t.Errorf("%s: %d renewals in a day: %s", name, n, j)
			}
			time.Sleep(30 * days)
			if n := renewals.Load(); n < 2 || n > 3 || r.Note() != "" {
				t.Errorf("%s: %d renewals in a month, note %q: %s", name, n, r.Note(), j)
			}
		})
	}
}
