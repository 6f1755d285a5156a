package reload

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/internal/testkit"
)

// polling is Watch on a file system without notifications; synctest bubbles need that.
func polling(ctx context.Context, paths []string, log *slog.Logger, changed func() bool) {
	(&watcher{paths: paths, log: log, changed: changed, notify: func([]string) (notifications, error) {
		return notifications{}, errors.New("no notifications here")
	}}).run(ctx)
}

// hourly is Watch for tests that cover a month.
func hourly(ctx context.Context, _ []string, _ *slog.Logger, changed func() bool) {
	for ctx.Err() == nil {
		changed()
		select {
		case <-time.After(time.Hour):
		case <-ctx.Done():
		}
	}
}

// running calls run in a goroutine until the end of the test.
func running(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// nameIn returns the common name of p's certificate.
func nameIn(p *Pair) string { return p.Certificate().Leaf.Subject.CommonName }

// pairFiles is the path of a certificate and of its key.
type pairFiles struct{ dir, cert, key string }

func newPairFiles(t *testing.T) pairFiles {
	dir := t.TempDir()
	return pairFiles{dir, filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")}
}

func (f pairFiles) write(t *testing.T, cert, key []byte) {
	t.Helper()
	writeFile(t, f.cert, cert)
	writeFile(t, f.key, key)
}

func TestPairFollowsItsFiles(t *testing.T) {
	ways := map[string]func(t *testing.T, f pairFiles, cert, key []byte){
		"written in place": func(t *testing.T, f pairFiles, cert, key []byte) { f.write(t, cert, key) },
		"renamed over": func(t *testing.T, f pairFiles, cert, key []byte) {
			pairFiles{f.dir, f.cert + ".new", f.key + ".new"}.write(t, cert, key)
			rename(t, f.key+".new", f.key)
			rename(t, f.cert+".new", f.cert)
		},
		"swapped as a Secret": func(t *testing.T, f pairFiles, cert, key []byte) {
			os.Remove(f.cert)
			os.Remove(f.key)
			name := fmt.Sprintf("..%x", sha256.Sum256(cert))
			version(t, f.dir, name, map[string][]byte{"tls.crt": cert, "tls.key": key})
		},
	}
	for name, change := range ways {
		for _, notifies := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, notifications=%v", name, notifies), func(t *testing.T) {
				t.Parallel()
				f := newPairFiles(t)
				cert, key := good(t, "first")
				change(t, f, cert, key)
				log, j := testkit.NewLog()
				p, err := NewPair(f.cert, f.key, log)
				if err != nil {
					t.Fatal(err)
				}
				if !notifies {
					p.watch = polling
				}
				running(t, p.Run)
				cert, key = good(t, "second")
				change(t, f, cert, key)
				testkit.Eventually(t, "the new certificate is in use", func() bool { return nameIn(p) == "second" })
				testkit.Eventually(t, "all is well", func() bool { return p.Note() == "" })
				testkit.Eventually(t, "it is logged", func() bool { return strings.Contains(j.String(), "read again") })
			})
		}
	}
}

func TestPairInOneFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.pem")
	cert, key := good(t, "node")
	writeFile(t, file, append(cert, key...))
	log, _ := testkit.NewLog()
	p, err := NewPair(file, file, log)
	if err != nil || nameIn(p) != "node" || len(p.paths) != 1 {
		t.Fatalf("%v, %v", p, err)
	}
}

func TestHalfWrittenPairIsNotAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newPairFiles(t)
		cert, key := good(t, "first")
		f.write(t, cert, key)
		log, j := testkit.NewLog()
		p, err := NewPair(f.cert, f.key, log)
		if err != nil {
			t.Fatal(err)
		}
		p.watch = polling
		running(t, p.Run)
		synctest.Wait() // the first look is done
		cert, key = good(t, "second")

		writeFile(t, f.cert, cert)
		time.Sleep(pollInterval + maxQuietWait)
		if nameIn(p) != "first" || p.Note() != "" || strings.Contains(j.String(), "are bad") {
			t.Errorf("the key may be written any moment: %q in use, note %q, log:\n%s", nameIn(p), p.Note(), j)
		}
		time.Sleep(time.Minute)
		if n := strings.Count(j.String(), "are bad"); nameIn(p) != "first" || n != 1 {
			t.Errorf("a certificate with an old key: %q in use, %d lines:\n%s", nameIn(p), n, j)
		}
		if p.Note() == "" || strings.Contains(p.Note(), f.dir) {
			t.Errorf("note %q", p.Note())
		}
		writeFile(t, f.cert, cert[:len(cert)/2])
		time.Sleep(time.Minute)
		if n := strings.Count(j.String(), "are bad"); nameIn(p) != "first" || n != 2 {
			t.Errorf("half a certificate, another fault: %q in use, %d lines:\n%s", nameIn(p), n, j)
		}
		f.write(t, cert, key)
		time.Sleep(time.Second)
		if nameIn(p) != "second" || p.Note() != "" {
			t.Errorf("the pair fits: %q in use, note %q", nameIn(p), p.Note())
		}

		for _, gone := range []string{f.key, f.cert} {
			if err := os.Remove(gone); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Second)
		}
		if nameIn(p) != "second" || p.Note() == "" {
			t.Errorf("the files are gone: %q in use, note %q", nameIn(p), p.Note())
		}
		f.write(t, cert, key)
		time.Sleep(time.Second)
		if p.Note() != "" || !strings.Contains(j.String(), "are good again") {
			t.Errorf("the files are back: note %q, log:\n%s", p.Note(), j)
		}
	})
}

// The clock of the other side decides about a client's certificate, so the newest one is taken.
func TestPairTakesNewer(t *testing.T) {
	f := newPairFiles(t)
	log, _ := testkit.NewLog()
	cert, key := certify(t, "first", time.Now().Add(-time.Hour), year)
	f.write(t, cert, key)
	p, err := NewPair(f.cert, f.key, log)
	if err != nil {
		t.Fatal(err)
	}
	p.TakeNewer()
	cert, key = certify(t, "tomorrow", time.Now().Add(24*time.Hour), year)
	f.write(t, cert, key)
	if err := p.load(); err != nil || nameIn(p) != "tomorrow" {
		t.Errorf("the pair in use is %s: %v", nameIn(p), err)
	}
}

func TestPairThatIsNotValidNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newPairFiles(t)
		log, j := testkit.NewLog()
		cert, key := certify(t, "old", time.Now().Add(-year), year/2)
		f.write(t, cert, key)
		p, err := NewPair(f.cert, f.key, log)
		if err != nil {
			t.Fatal("at the start there is no better one: ", err)
		}
		p.watch = polling
		running(t, p.Run)
		synctest.Wait() // the first look is done
		goodCert, goodKey := good(t, "first")
		f.write(t, goodCert, goodKey)
		time.Sleep(time.Second)
		if nameIn(p) != "first" {
			t.Fatalf("%q in use:\n%s", nameIn(p), j)
		}
		f.write(t, cert, key)
		time.Sleep(time.Minute)
		if n := strings.Count(j.String(), "not valid at this time"); nameIn(p) != "first" || n != 1 {
			t.Errorf("%q in use, %d lines:\n%s", nameIn(p), n, j)
		}
		cert, key = certify(t, "early", time.Now().Add(time.Hour), year)
		f.write(t, cert, key)
		time.Sleep(time.Minute)
		if nameIn(p) != "first" {
			t.Errorf("%q in use an hour before it is valid", nameIn(p))
		}
		time.Sleep(time.Hour)
		if nameIn(p) != "early" {
			t.Errorf("%q in use when the new one is valid", nameIn(p))
		}
	})
}

func TestExpiryIsLoggedOnce(t *testing.T) {
	for name, tc := range map[string]struct{ life, warns time.Duration }{
		"a long life":  {30 * 24 * time.Hour, 24 * time.Hour},
		"a short life": {time.Hour, 10 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newPairFiles(t)
				cert, key := certify(t, "first", time.Now(), tc.life)
				f.write(t, cert, key)
				log, j := testkit.NewLog()
				p, err := NewPair(f.cert, f.key, log)
				if err != nil {
					t.Fatal(err)
				}
				p.watch = hourly
				running(t, p.Run)
				lines := func(want string, soon, late int) {
					t.Helper()
					s, l := strings.Count(j.String(), "expires soon"), strings.Count(j.String(), "has expired")
					if s != soon || l != late {
						t.Errorf("%s: %d lines that it expires soon and %d that it has, want %d and %d:\n%s",
							want, s, l, soon, late, j)
					}
				}
				time.Sleep(tc.life - tc.warns - 2*expiryInterval)
				lines("before", 0, 0)
				if p.Note() != "" {
					t.Errorf("before: note %q", p.Note())
				}
				time.Sleep(4 * expiryInterval)
				lines("soon", 1, 0)
				if p.Note() != expiring.String() {
					t.Errorf("soon: note %q", p.Note())
				}
				time.Sleep(tc.warns)
				lines("expired", 1, 1)
				if p.Note() != expired.String() {
					t.Errorf("expired: note %q", p.Note())
				}
				cert, key = good(t, "second")
				f.write(t, cert, key)
				time.Sleep(time.Hour)
				lines("renewed", 1, 1)
				if p.Note() != "" {
					t.Errorf("renewed: note %q", p.Note())
				}
			})
		})
	}
}

func TestPoolFollowsItsFile(t *testing.T) {
	const notDER = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n"
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "ca.crt")
		one, _ := good(t, "one")
		two, key := good(t, "two")
		writeFile(t, file, one)
		log, j := testkit.NewLog()
		p, err := NewPool(file, log)
		if err != nil {
			t.Fatal(err)
		}
		p.watch = polling
		running(t, p.Run)
		first := p.Pool()
		time.Sleep(time.Minute)
		if p.Pool() != first {
			t.Error("the pool is another one though nothing has changed")
		}
		writeFile(t, file, bytes.Join([][]byte{[]byte("# both\n"), one, []byte("\n"), two}, nil))
		time.Sleep(time.Second)
		want := x509.NewCertPool()
		want.AppendCertsFromPEM(append(bytes.Clone(one), two...))
		if !p.Pool().Equal(want) {
			t.Fatalf("the pool is not the file's:\n%s", j)
		}
		for what, content := range map[string][]byte{
			"empty": nil, "no PEM": []byte("hello"), "no certificate": key,
			"cut off": append(bytes.Clone(one), two[:len(two)/2]...),
			"rubbish": bytes.Join([][]byte{one, []byte(notDER)}, nil),
		} {
			writeFile(t, file, content)
			time.Sleep(2 * time.Second)
			if !p.Pool().Equal(want) || p.Note() == "" {
				t.Errorf("%s: the pool has changed, or nothing is noted", what)
			}
		}
		if n := strings.Count(j.String(), "are bad"); n < 4 {
			t.Errorf("%d lines, want one for each fault:\n%s", n, j)
		}
		writeFile(t, file, two)
		time.Sleep(time.Second)
		if p.Pool().Equal(want) || p.Note() != "" {
			t.Errorf("a CA is still in the pool, note %q", p.Note())
		}
	})
}

func TestBadFilesAtTheStart(t *testing.T) {
	f := newPairFiles(t)
	cert, key := good(t, "one")
	other, _ := good(t, "other")
	log, _ := testkit.NewLog()
	files := NewFiles(log)
	for what, tc := range map[string]struct {
		cert, key []byte
		want      string
	}{
		"another key":  {other, key, "does not match"},
		"no key":       {cert, cert, "key"},
		"empty":        {nil, key, "is empty"},
		"far too long": {bytes.Repeat(cert, 2048), key, "is longer than"},
	} {
		f.write(t, tc.cert, tc.key)
		_, err := files.Pair("mode.cloud.https", f.cert, f.key)
		if err == nil || !strings.Contains(err.Error(), tc.want) ||
			!strings.Contains(err.Error(), "mode.cloud.https: cert "+f.cert) {
			t.Errorf("%s: %v", what, err)
		}
	}
	f.write(t, cert, key)
	if _, err := files.Pair("x", f.dir, f.key); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Error(err)
	}
	_, err := files.Pool("mode.cloud.https clientca", f.key)
	if err == nil || !strings.Contains(err.Error(), "mode.cloud.https clientca: ca "+f.key) {
		t.Error(err)
	}
	if len(files.all) > 0 {
		t.Error("bad files are followed")
	}
}

func TestFiles(t *testing.T) {
	f := newPairFiles(t)
	from := time.Now().Add(-time.Minute).Truncate(time.Second)
	cert, key := certify(t, "one", from, year)
	f.write(t, cert, key)
	log, j := testkit.NewLog()
	files := NewFiles(log)
	if _, err := files.Pair("mode.cloud.https", f.cert, f.key); err != nil {
		t.Fatal(err)
	}
	if _, err := files.Pool("mode.cloud.https clientca", f.cert); err != nil {
		t.Fatal(err)
	}
	running(t, files.Run)
	registry := prometheus.NewRegistry()
	registry.MustRegister(files.Collector())
	families, err := registry.Gather()
	if err != nil || len(families) != 2 { // the end, and the start
		t.Fatalf("%v, %v", families, err)
	}
	for i, at := range []time.Time{from.Add(year), from} {
		for k, use := range []string{"mode.cloud.https", "mode.cloud.https clientca"} {
			m := families[i].GetMetric()[k]
			if m.GetLabel()[0].GetValue() != use || m.GetGauge().GetValue() != float64(at.Unix()) {
				t.Errorf("%v, want %s at %v", m, use, at)
			}
		}
	}
	writeFile(t, f.key, []byte("hello"))
	testkit.Eventually(t, "the fault is noted and logged", func() bool {
		return strings.HasPrefix(files.Note(), "mode.cloud.https: its files are bad") &&
			strings.Contains(j.String(), "use=mode.cloud.https ")
	})
	if strings.Contains(files.Note(), "clientca") {
		t.Errorf("note %q, log:\n%s", files.Note(), j)
	}
}

// Run follows the files until ctx is done.
func (f *followed) Run(ctx context.Context) error {
	follow(ctx, f.watch, f.log, f)
	return nil
}
