package udp

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
)

// answers waits until a server answers directly, so that what fails later is the tunnel's fault.
func answers(t *testing.T, ask func(addr string) error, addr string) {
	t.Helper()
	testkit.Within(t, patience, "the server answers without the tunnel", func() error { return ask(addr) })
}

// DNS: dig asks dnsmasq, for a short answer and for one of several kilobytes.
func TestDNS(t *testing.T) {
	dig, dnsmasq := needs(t, "dig"), needs(t, "dnsmasq")
	target := testkit.FreeAddress(t)
	host, port := split(t, target)
	var names strings.Builder
	const large = 40 // texts of 100 bytes: more than a packet
	for i := range large {
		fmt.Fprintf(&names, "txt-record=large.test,%02d%s\n", i, strings.Repeat("x", 98))
	}
	conf := write(t, "dnsmasq.conf", "address=/small.test/192.0.2.7\nedns-packet-max=8192\n"+names.String())
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	serve(t, dnsmasq, "--keep-in-foreground", "--no-resolv", "--no-hosts", "--bind-interfaces", "--user="+me.Username,
		"--pid-file=", "--listen-address="+host, "--port="+port, "--conf-file="+conf)
	ask := func(addr string) error {
		host, port := split(t, addr)
		out, err := output(t, dig, "+short", "+tries=3", "+notcp", "@"+host, "-p", port, "small.test", "A")
		if err == nil && strings.TrimSpace(out) != "192.0.2.7" {
			err = errors.New(out)
		}
		return err
	}
	answers(t, ask, target)
	p := forward(t, target, "late")
	for range 50 {
		if err := ask(p.door); err != nil {
			t.Fatal(err)
		}
	}
	host, port = split(t, p.door)
	out, err := output(t, dig, "+short", "+tries=3", "+notcp", "+ignore", "+bufsize=8192",
		"@"+host, "-p", port, "large.test", "TXT")
	if err != nil || strings.Count(out, "xxx") < large || strings.Count(out, "\n") != large {
		t.Errorf("%v: the large answer has %d lines:\n%s", err, strings.Count(out, "\n"), out)
	}
}

// SNMP: snmpwalk reads a subtree of snmpd.
func TestSNMP(t *testing.T) {
	walk, snmpd := needs(t, "snmpwalk"), needs(t, "snmpd")
	target := testkit.FreeAddress(t)
	conf := write(t, "snmpd.conf", "rocommunity public 127.0.0.1\nsysLocation behind the edge\n")
	serve(t, snmpd, "-f", "-Lo", "-C", "-c", conf, "-I", "system_mib,sysORTable,snmp_mib,ifTable,ip",
		"-p", filepath.Join(t.TempDir(), "pid"), "udp:"+target)
	ask := func(addr string) (string, error) {
		return output(t, walk, "-v2c", "-c", "public", "-On", "-t", "2", "-r", "3", addr, ".1.3.6.1.2.1")
	}
	answers(t, func(addr string) error { _, err := ask(addr); return err }, target)
	p := forward(t, target, "late")
	out, err := ask(p.door)
	if err != nil || !strings.Contains(out, "behind the edge") || strings.Count(out, "\n") < 20 {
		t.Errorf("%v: the walk has %d lines:\n%s", err, strings.Count(out, "\n"), out)
	}
	t.Logf("a walk of %d values", strings.Count(out, "\n"))
}

// Syslog: logger sends a thousand lines to rsyslogd, which answers nothing.
func TestSyslog(t *testing.T) {
	logger, rsyslogd := needs(t, "logger"), needs(t, "rsyslogd")
	target := testkit.FreeAddress(t)
	host, port := split(t, target)
	dir := t.TempDir()
	received := filepath.Join(dir, "received")
	conf := write(t, "rsyslog.conf", fmt.Sprintf(`global(workDirectory=%q)
module(load="imudp")
input(type="imudp" address=%q port=%q rcvbufSize="1m")
template(name="bare" type="string" string="%%msg%%\n")
action(type="omfile" file=%q template="bare")
`, dir, host, port, received))
	serve(t, rsyslogd, "-n", "-f", conf, "-i", filepath.Join(dir, "pid"))
	send := func(addr, text string) error {
		host, port := split(t, addr)
		_, err := output(t, logger, "-n", host, "-P", port, "-d", "--rfc3164", text)
		return err
	}
	has := func(text string) error {
		b, err := os.ReadFile(received)
		if err == nil && !strings.Contains(string(b), text) {
			err = fmt.Errorf("%q has not arrived", text)
		}
		return err
	}
	answers(t, func(addr string) error { return errors.Join(send(addr, "directly"), has("directly")) }, target)
	p := forward(t, target, "late")
	// One logger sends the lines of its standard input, as a daemon would.
	var lines strings.Builder
	const n = 1000
	for i := range n {
		fmt.Fprintf(&lines, "line %04d\n", i)
	}
	host, port = split(t, p.door)
	file := write(t, "lines", lines.String())
	if _, err := output(t, logger, "-n", host, "-P", port, "-d", "--rfc3164", "-f", file); err != nil {
		t.Fatal(err)
	}
	testkit.Within(t, patience, "all lines have arrived", func() error {
		b, err := os.ReadFile(received)
		if got, late := strings.Count(string(b), "line "), p.late(); err == nil && got+late != n {
			err = fmt.Errorf("%d lines, %d datagrams were late", got, late)
		}
		return err
	})
	b, _ := os.ReadFile(received)
	last := -1
	for line := range strings.Lines(string(b)) {
		i := strings.Index(line, "line ")
		if i < 0 {
			continue
		}
		var at int
		fmt.Sscanf(line[i:], "line %04d", &at)
		if at <= last {
			t.Errorf("line %d follows line %d", at, last)
		}
		last = at
	}
}

// CoAP: coap-client reads and writes a resource of coap-server, also one of many blocks.
func TestCoAP(t *testing.T) {
	client, server := coap(t, "coap-client"), coap(t, "coap-server")
	target := testkit.FreeAddress(t)
	host, port := split(t, target)
	serve(t, server, "-A", host, "-p", port, "-d", "10")
	get := func(addr string) error {
		out, err := output(t, client, "-B", "5", "-m", "get", "coap://"+addr+"/")
		if err == nil && !strings.Contains(out, "libcoap") {
			err = errors.New(out)
		}
		return err
	}
	answers(t, get, target)
	p := forward(t, target, "late")
	if err := get(p.door); err != nil {
		t.Error(err)
	}
	body := strings.Repeat("0123456789abcdef", 1000) // sixteen blocks of 1,024 bytes
	url := "coap://" + p.door + "/made"
	if _, err := output(t, client, "-B", "10", "-m", "put", "-b", "1024", "-f", write(t, "body", body), url); err != nil {
		t.Fatal(err)
	}
	out, err := output(t, client, "-B", "10", "-m", "get", "-b", "1024", url)
	if err != nil || !strings.Contains(out, body) {
		t.Errorf("%v: %d bytes came back, of %d", err, len(out), len(body))
	}
}

// coap returns the path of a program of libcoap3-bin, which names its variants by their TLS library.
func coap(t *testing.T, name string) string {
	t.Helper()
	for _, variant := range []string{"", "-notls", "-openssl", "-gnutls", "-mbedtls"} {
		if _, err := os.Stat("/usr/bin/" + name + variant); err == nil {
			return "/usr/bin/" + name + variant
		}
	}
	return needs(t, name)
}
