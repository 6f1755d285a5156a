package https

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestFraming(t *testing.T) {
	get := "GET / HTTP/1.1\r\nHost: edge1\r\n\r\n"
	post := "POST / HTTP/1.1\r\nHost: edge1\r\nContent-Length: 44\r\n\r\n" +
		"Content-Length: 1\r\nTransfer-Encoding: x\r\n\r\n??"
	both := "POST / HTTP/1.1\r\nHost: edge1\r\ncontent-length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
	for name, test := range map[string]struct {
		in   string
		both bool
	}{
		"get":           {get, false},
		"pipelined":     {get + get + post + get, false},
		"both":          {both, true},
		"both, bare LF": {strings.ReplaceAll(both, "\r\n", "\n"), true},
		"both, later":   {get + post + "\r\n" + both + "0\r\n\r\n", true},
		// The connection closes after a chunked body.
		"chunked": {strings.Replace(both, "content-length: 3\r\n", "", 1) + "0\r\n\r\n" + both, false},
		// net/http refuses a bad length.
		"bad length": {strings.Replace(post, "44", "-1", 1) + both, false},
		"endless":    {"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 4*DefaultLimits().Headers), false},
	} {
		for _, step := range []int{1, 7, 1 << 20} {
			t.Run(fmt.Sprintf("%s/%d", name, step), func(t *testing.T) {
				f := framing{maxHead: DefaultLimits().maxHeaderBytes()}
				for in := []byte(test.in); len(in) > 0; {
					n := f.next(in[:min(step, len(in))])
					if n == 0 {
						t.Fatal("nothing was taken")
					}
					in = in[n:]
				}
				if f.both != test.both {
					t.Errorf("both = %v", f.both)
				}
			})
		}
	}
}

// framing interprets a connection's bytes as net/http does: if it reports no head with both fields,
// then net/http's parser has not dropped a Content-Length.
func FuzzFraming(f *testing.F) {
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: a\r\n\r\n"))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"))
	f.Add([]byte("\r\nGET / HTTP/1.0\nTransfer-Encoding : chunked\n\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		fr := framing{maxHead: DefaultLimits().maxHeaderBytes()}
		for p := in; len(p) > 0; {
			n := fr.next(p)
			if n <= 0 || n > len(p) {
				t.Fatalf("took %d of %d bytes", n, len(p))
			}
			p = p[n:]
		}
		br := bufio.NewReader(bytes.NewReader(in))
		r, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		parsed := bytes.ToLower(in[:len(in)-br.Buffered()])
		if len(r.TransferEncoding) > 0 && bytes.Contains(parsed, []byte("\ncontent-length:")) && !fr.both {
			t.Error("a request with both was not seen")
		}
	})
}

func TestBothLengths(t *testing.T) {
	r := newRig(t, nil, nil).start()
	for _, first := range []string{
		"",
		"GET / HTTP/1.1\r\nHost: edge1\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: edge1\r\nContent-Length: 3\r\n\r\nabc",
	} {
		c := r.raw(r.caller("127.0.0.1"))
		br := bufio.NewReader(c)
		_, err := io.WriteString(c, first+
			"POST / HTTP/1.1\r\nHost: edge1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"+
			"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: edge1\r\n\r\n")
		must(t, err)
		if first != "" {
			res := readResponse(t, br, "GET")
			io.Copy(io.Discard, res.Body)
		}
		res := readResponse(t, br, "POST")
		b, err := io.ReadAll(res.Body)
		must(t, err)
		wantStatus(t, res, string(b), 400, "Content-Length")
		if rest, err := io.ReadAll(br); len(rest) > 0 {
			t.Errorf("more came: %q, %v", rest, err)
		}
	}
}

// HTTP/1.0 has no Transfer-Encoding, and net/http ignores it there.
func TestBothLengthsInHTTP10(t *testing.T) {
	r := newRig(t, nil, nil).start()
	for head, words := range map[string]string{
		"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n":      "both Content-Length and Transfer-Encoding",
		"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n":      "both Content-Length and Transfer-Encoding",
		"transfer-encoding: xchunked\r\nContent-Length: 5\r\n":     "both Content-Length and Transfer-Encoding",
		"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n": "which HTTP/1.0 does not know",
	} {
		c := r.raw(r.caller("127.0.0.1"))
		br := bufio.NewReader(c)
		_, err := io.WriteString(c, "POST / HTTP/1.0\r\nHost: edge1\r\nConnection: keep-alive\r\n"+head+
			"\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: edge1\r\n\r\n")
		must(t, err)
		res := readResponse(t, br, "POST")
		b, err := io.ReadAll(res.Body)
		must(t, err)
		wantStatus(t, res, string(b), 400, words)
		if rest, err := io.ReadAll(br); len(rest) > 0 {
			t.Errorf("%q: more came: %q, %v", head, rest, err)
		}
	}
}

func TestChunkedRequestIsTheLast(t *testing.T) {
	r := newRig(t, nil, nil).start()
	c := r.raw(r.caller("127.0.0.1"))
	br := bufio.NewReader(c)
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: edge1\r\nTransfer-Encoding: chunked\r\n\r\n"+
		"3\r\nabc\r\n0\r\n\r\n")
	must(t, err)
	res := readResponse(t, br, "POST")
	b, err := io.ReadAll(res.Body)
	must(t, err)
	wantStatus(t, res, string(b), 200, "pong")
	if !res.Close {
		t.Error("the connection is kept")
	}
}
